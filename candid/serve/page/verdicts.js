// The last verdicts of this server, unknown images first.

import { api, ask, hasToken, setToken } from "./client.js";
import { badge, byId, coloured, html, percent, short, unbroken, verdictOf } from "./dom.js";
import { showDrift } from "./drift.js";

function show(id, text) {
  byId(id).textContent = text;
  byId(id).hidden = text === "";
}

function thumbnail(id) {
  const picture = html("img", { alt: "", width: 96, height: 96 });
  ask(`/v1/verdicts/image?id=${id}`).then((answer) => answer.blob()).then((blob) => {
    picture.onload = () => URL.revokeObjectURL(picture.src);
    picture.src = URL.createObjectURL(blob);
  }).catch(() => {}); // it was removed in the meantime
  return picture;
}

function card(model, found) {
  const verdict = verdictOf(model, found.verdict);
  const sign = coloured(html("span", { className: "badge" }, badge(verdict)), verdict);
  const p = found.p_value === null ? "" : ` · p = ${short(found.p_value)}`;
  const words = html("div", {}, html("b", { textContent: found.verdict }), html("br"), unbroken(`${found.label}, ${percent(found.confidence)}${p}`), html("br"), html("span", { className: "muted", textContent: found.file }));
  return html("li", {}, thumbnail(found.id), sign, words);
}

async function start() {
  try {
    const { needs_token: needed } = await api("/healthz");
    if (needed && !hasToken()) return askForToken(false);
    const [model] = (await api("/v1/models")).models;
    if (!model.stores_images) return show("problem", "This server stores no images: start it with 'candid serve --store DIR'.");
    const { stored, verdicts } = await api("/v1/verdicts?limit=60");
    const kinds = [...model.verdicts.map(({ kind }) => kind), "no verdict"];
    const counts = kinds.filter((kind) => stored[kind]).map((kind) => `${stored[kind]} ${kind}`);
    byId("counts").textContent = counts.length ? `Stored: ${counts.join(", ")}.${needed ? " Only who has the token can see them." : ""}` : "No images are stored yet.";
    byId("verdicts").replaceChildren(...verdicts.map((each) => card(model, each)));
    const { alarm, carriers } = await showDrift();
    byId("evidence").hidden = !alarm;
    byId("carriers").replaceChildren(...(alarm ? carriers : []).filter(({ name }) => name).map(({ image, name, gain }) =>
      html("li", {}, thumbnail(Number.parseInt(name, 10)), html("div", {}, html("b", { textContent: `image ${image}` }), html("br"), `evidence × ${short(gain)}`, html("br"), html("span", { className: "muted", textContent: name })))));
  } catch (error) {
    if (!error.needsToken) return show("problem", error.message);
    askForToken(error.wrong);
  }
}

function askForToken(wrong) {
  byId("token-form").hidden = false;
  byId("token-wrong").textContent = wrong ? "This token is not correct." : "";
  byId("token").focus();
}

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setToken(byId("token").value.trim());
  byId("token").value = "";
  byId("token-form").hidden = true;
  start();
});
start();
