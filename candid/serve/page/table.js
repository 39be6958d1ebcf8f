// The table of all photos: sorted, filtered, walked through by keyboard.

import { answerOf, badge, byId, coloured, count, decimals, html, percent, showPromises, verdictOf } from "./dom.js";
import { done, photos, stateOf } from "./photos.js";

const UNUSABLE = "can't be used";
const natural = new Intl.Collator("en", { numeric: true, sensitivity: "base" });
const COLUMNS = {
  photo: { words: "Photo", value: (photo) => photo.name },
  verdict: { words: "Verdict", value: (photo) => rank(stateOf(photo)) },
  class: { words: "Class", value: (photo) => photo.result?.label ?? "" },
  posterior: { words: "Posterior", value: (photo) => photo.result?.confidence ?? 2 },
  p: { words: "p-value", value: (photo) => photo.result?.p_value ?? 2 },
};
const rows = new Map(); // by photo
const drawn = new WeakMap(); // what a row shows beyond the verdict
let model = null, open = null, sorted = { by: "verdict", falling: false }, filter = { verdict: "", class: "" }, order = [];

// What needs attention first; files that can't be used after all verdicts, and before those that wait.
export const kinds = () => [...model.verdicts.map(({ kind }) => kind), "no verdict", "unusable", "waiting"];
const rank = (kind) => kinds().indexOf(kind);
export const wordOf = (kind) => (kind === "unusable" ? UNUSABLE : kind === "waiting" ? "waiting" : verdictOf(model, kind).word || "no verdict");

// The photos that the table shows, in its order.
export const shown = () => order;

export function begin(served, opener) {
  model = served;
  open = opener;
  byId("photos").querySelector("thead tr").replaceChildren(...Object.entries(COLUMNS).map(([name, { words }]) => {
    const button = html("button", { className: "link", textContent: words });
    button.addEventListener("click", () => {
      sorted = { by: name, falling: sorted.by === name && !sorted.falling };
      render();
    });
    const head = html("th", { scope: "col", className: `c-${name}` }, button);
    head.setAttribute("role", "columnheader");
    return head;
  }));
}

function compare(one, other) {
  const { value } = COLUMNS[sorted.by], a = value(one), b = value(other);
  const by = typeof a === "string" ? natural.compare(a, b) : a - b;
  return (sorted.falling ? -by : by) || (one.result?.p_value ?? 2) - (other.result?.p_value ?? 2) || natural.compare(one.name, other.name);
}

export function render() {
  const kept = photos.filter((photo) => (!filter.verdict || stateOf(photo) === filter.verdict) && (!filter.class || photo.result?.label === filter.class));
  order = kept.sort(compare);
  for (const head of byId("photos").querySelectorAll("th")) {
    if (head.classList.contains(`c-${sorted.by}`)) head.setAttribute("aria-sort", sorted.falling ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  }
  const body = byId("photos").querySelector("tbody"), focused = document.activeElement;
  const wanted = order.map(rowOf);
  if (wanted.length !== body.children.length || wanted.some((row, i) => row !== body.children[i])) {
    body.replaceChildren(...wanted);
    if (focused?.isConnected && body.contains(focused)) focused.focus({ preventScroll: true });
  }
  if (!body.querySelector("button[tabindex='0']")) body.querySelector("button")?.setAttribute("tabindex", "0");
  byId("list-title").textContent = count(photos.length, "photo");
  showFilters();
  showPromises("list-promises", photos.find((photo) => photo.result)?.result.promises);
}

export function reset() {
  rows.clear();
  filter = { verdict: "", class: "" };
  sorted = { by: "verdict", falling: false };
}

function cell(name, ...children) {
  const element = html("td", { className: `c-${name}` }, ...children);
  element.setAttribute("role", "cell");
  return element;
}

function rowOf(photo) {
  const row = rows.get(photo) || newRow(photo), kind = stateOf(photo);
  const picture = row.querySelector(".thumb");
  if (photo.thumbnail && picture.tagName !== "IMG") {
    picture.replaceWith(html("img", { className: "thumb", src: photo.thumbnail.src, alt: "" }));
  }
  if (row.dataset.kind !== kind || drawn.get(row) !== `${photo.version} ${photo.correction}`) {
    row.dataset.kind = kind;
    drawn.set(row, `${photo.version} ${photo.correction}`);
    row.replaceChildren(row.firstElementChild, ...cells(photo, kind));
  }
  return row;
}

function newRow(photo) {
  const button = html("button", { className: "name", textContent: photo.name, tabIndex: -1 });
  const row = html("tr", {}, cell("photo", html("span", { className: "thumb" }), button));
  row.setAttribute("role", "row");
  row.addEventListener("click", () => open(photo));
  rows.set(photo, row);
  return row;
}

function cells(photo, kind) {
  const verdict = verdictOf(model, kind), { result } = photo;
  const sign = coloured(html("span", { className: "badge" }, kind === "waiting" ? "" : badge(kind === "unusable" ? { tone: "none" } : verdict)), verdict);
  const word = cell("verdict", sign, html("span", { textContent: wordOf(kind) }));
  if (!result) {
    const error = cell("error", photo.error);
    error.colSpan = 3;
    return [word, error];
  }
  const p = result.p_value;
  const corrected = photo.correction ? html("span", { className: "tag", textContent: ` → ${photo.correction}` }) : "";
  return [word, cell("class", answerOf(result) || html("span", { className: "muted", textContent: `${result.label}?` }), corrected),
    cell("posterior", percent(result.confidence)), cell("p", p === null ? "–" : html("span", {}, html("span", { className: "narrow", textContent: "p = " }), decimals(p)))];
}

function showFilters() {
  const counts = new Map();
  for (const photo of photos) counts.set(stateOf(photo), (counts.get(stateOf(photo)) || 0) + 1);
  const choices = [["", `all ${photos.length}`], ...kinds().filter((kind) => counts.has(kind)).map((kind) => [kind, `${wordOf(kind)} ${counts.get(kind)}`])];
  if (filter.verdict && !counts.has(filter.verdict)) filter.verdict = "";
  const group = byId("filter-verdict"), focused = [...group.children].indexOf(document.activeElement);
  group.replaceChildren(...choices.map(([kind, words]) => {
    const button = html("button", { className: "chip", textContent: words });
    button.setAttribute("aria-pressed", String(filter.verdict === kind));
    button.addEventListener("click", () => { filter.verdict = kind; render(); });
    return button;
  }));
  group.children[focused]?.focus({ preventScroll: true });
  const names = [...new Set(photos.filter(({ result }) => result).map(({ result }) => result.label))].sort(natural.compare);
  const select = byId("filter-class");
  select.replaceChildren(html("option", { value: "", textContent: "all" }), ...names.map((name) => html("option", { value: name, textContent: name })));
  select.value = names.includes(filter.class) ? filter.class : "";
  filter.class = select.value;
}

export function refresh(photo) {
  if (rows.has(photo)) rowOf(photo);
}

export function focusOn(photo) {
  const button = rows.get(photo)?.querySelector("button");
  if (!button?.isConnected) return byId("list-title").focus();
  move(button);
}

function move(button) {
  for (const other of byId("photos").querySelectorAll("tbody button[tabindex='0']")) other.tabIndex = -1;
  button.tabIndex = 0;
  button.focus();
}

byId("photos").addEventListener("keydown", (event) => {
  const buttons = [...byId("photos").querySelectorAll("tbody button")], at = buttons.indexOf(event.target);
  const to = { ArrowUp: at - 1, ArrowDown: at + 1, Home: 0, End: buttons.length - 1 }[event.key];
  if (at < 0 || to === undefined) return;
  event.preventDefault();
  if (buttons[to]) move(buttons[to]);
});
byId("filter-class").addEventListener("change", (event) => { filter.class = event.target.value; render(); });

export const judged = () => photos.filter(done).length;
