// What people take with them: a table for spreadsheets, and one page with photos that needs no other file.

import { answerOf, count, decimals, html, percent } from "./dom.js";
import { photos, stateOf } from "./photos.js";

const LEFT_OUT = ["promises", "seen", "explanation"]; // the first is the same in every row
const escaped = (text) => String(text).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);

// As the cells of every CSV file of Candid: text is no formula of a spreadsheet, and what is no text is JSON.
function cell(value) {
  if (value === null || value === undefined) return "";
  const text = typeof value === "string" ? value.replace(/[\x00-\x1f\x7f]/g, " ") : JSON.stringify(value);
  const formula = typeof value === "string" && /^[=+\-@]/.test(text) && Number.isNaN(Number(text));
  const safe = formula ? `'${text}` : text;
  return /[",\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

// A row for each photo in the order in which they came, with the keys of the JSON; the byte order mark is for spreadsheets.
export function csv() {
  const judged = photos.find(({ result }) => result)?.result || { status: "", path: "" };
  const keys = Object.keys(judged).filter((key) => !LEFT_OUT.includes(key));
  const rows = photos.map((photo) => [...keys.map((key) => (key === "path" ? photo.name : key === "status" ? photo.state : photo.result?.[key])), photo.error || null]);
  return `\ufeff${[[...keys, "error"], ...rows].map((row) => row.map(cell).join(",")).join("\n")}\n`;
}

const STYLE = `:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 0 0 1.5rem; }
th, td { text-align: left; padding: 6px 8px; border-top: 1px solid light-dark(#dcdde0, #343941); overflow-wrap: anywhere; vertical-align: middle; }
td.number, th.number { text-align: right; white-space: nowrap; }
tr { break-inside: avoid; } td.picture { width: 112px; }
img { display: block; max-width: 96px; max-height: 96px; border-radius: 6px; }
@media (max-width: 560px) {
  thead { display: none; } table, tbody { display: block; }
  tr { display: grid; grid-template-columns: 64px minmax(0, 1fr) auto; gap: 0 12px; padding: 8px 0; border-top: 1px solid light-dark(#dcdde0, #343941); }
  td { border: 0; padding: 0; } td.picture { width: auto; grid-row: 1 / span 3; } img { max-width: 64px; }
  td:nth-child(2) { grid-column: 2 / span 2; } td:nth-child(3) { grid-column: 2; } td[colspan] { grid-column: 2 / span 2; } td:nth-child(5) { grid-column: 3; }
}`;

const asData = (blob) => new Promise((resolve) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.readAsDataURL(blob);
});

async function line(photo) {
  const picture = photo.thumbnail ? `<img alt="" src="${await asData(photo.thumbnail.blob)}">` : "", { result } = photo;
  const cells = result ? `<td>${escaped(answerOf(result) || `${result.label}?`)}</td><td class="number">${percent(result.confidence)}</td><td class="number">${result.p_value === null ? "–" : decimals(result.p_value)}</td>`
    : `<td colspan="3">${escaped(photo.error || "It was not examined yet.")}</td>`;
  return `<tr><td class="picture">${picture}</td><td>${escaped(photo.name)}</td>${cells}</tr>`;
}

// A table for each verdict, those that need attention first, with the server's words for what they promise.
export async function page(model, kinds, wordOf) {
  const parts = [];
  for (const kind of kinds) {
    const some = photos.filter((photo) => stateOf(photo) === kind);
    if (!some.length) continue;
    const { sentence = "", colour, dark_colour: dark } = model.verdicts.find((verdict) => verdict.kind === kind) || {};
    const style = colour ? ` style="color: light-dark(${colour}, ${dark})"` : "";
    parts.push(`<h2${style}>${escaped(wordOf(kind))}: ${some.length}</h2><p>${escaped(sentence)}</p><table><thead><tr><th></th><th>photo</th><th>class</th><th class="number">posterior</th><th class="number">p-value</th></tr></thead><tbody>`,
      ...await Promise.all(some.map(line)), "</tbody></table>");
  }
  const promises = photos.find(({ result }) => result?.promises)?.result.promises;
  const words = promises ? `<p>${escaped(promises.plain)}</p><details><summary>All numbers and conditions</summary><ul>${promises.sentences.map((sentence) => `<li>${escaped(sentence)}</li>`).join("")}</ul></details>` : "";
  const title = `${count(photos.length, "photo")}, examined by the model ${model.name}`, day = new Date().toISOString().slice(0, 10);
  return `<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>${escaped(title)}</title><style>${STYLE}</style></head>
<body><h1>${escaped(title)}</h1><p>${day}</p>${words}
${parts.join("\n")}
</body></html>
`;
}

export function download(content, type, name) {
  const link = html("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
