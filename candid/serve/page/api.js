// The OpenAPI description of this server, as a page.

import { byId, html } from "./dom.js";

const name = (schema) => {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.length > 12 ? "one of the classes" : schema.enum.join(" | ");
  if (schema.const) return schema.const;
  if (schema.type === "array") return `list of ${name(schema.items)}`;
  if (schema.contentMediaType || schema.format === "binary") return "file";
  return (schema.anyOf || schema.oneOf || []).map(name).join(" or ") || schema.type || "";
};

const table = (label, heads, rows) => html("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: `${label}, to scroll` }, html("table", { ariaLabel: label }, html("thead", {}, html("tr", {}, ...heads.map((head) => html("th", { scope: "col", textContent: head })))),
  html("tbody", {}, ...rows.map((row) => html("tr", {}, ...row.map((cell) => html("td", { textContent: cell })))))));

function fields(operation, schemas) {
  const found = (operation.parameters || []).map((each) => [each.name, `query, ${name(each.schema)}`, each.description || ""]);
  const body = operation.requestBody?.content["multipart/form-data"]?.schema;
  const { properties = {} } = body ? schemas[name(body)] : {};
  return found.concat(Object.entries(properties).map(([key, each]) => [key, `multipart, ${name(each)}`, each.description || ""]));
}

const description = await (await fetch("openapi.json")).json();
byId("about").textContent = description.info.description;
byId("example").textContent = `curl -F file=@cat.png '${new URL("v1/examine", location)}?explain=true'\ncurl -F file=@cat.png -F towards=dog ${new URL("v1/counterfactual", location)}`;
for (const [path, methods] of Object.entries(description.paths)) {
  for (const [method, operation] of Object.entries(methods)) {
    const takes = fields(operation, description.components.schemas);
    byId("addresses").append(html("section", {}, html("h2", { textContent: `${method.toUpperCase()} ${path}` }), html("p", { textContent: operation.description }),
      ...(takes.length ? [table(`What ${path} takes`, ["field", "kind", "what"], takes)] : []),
      table(`What ${path} answers`, ["status", "answer", "when"], Object.entries(operation.responses).map(([code, answer]) =>
        [code, name(answer.content?.["application/json"]?.schema) || "text", answer.description]))));
  }
}
const { schemas } = description.components;
byId("addresses").append(html("h2", { textContent: "Answers" }), ...Object.entries(schemas).filter(([key]) => !key.startsWith("Body_")).map(([key, schema]) =>
  html("section", {}, html("h3", { textContent: key }), html("p", { textContent: schema.description || "" }),
    table(key, ["field", "kind", "what"], Object.entries(schema.properties || {}).map(([field, each]) => [field, name(each), each.description || ""])))));
