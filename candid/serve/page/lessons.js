// Corrections, groups of unknown photos, and the models that were taught from them: all of the loop on one page.

import { api, ask, formFields } from "./client.js";
import { announce, byId, count, html, listed, percent, show, unbroken } from "./dom.js";
import { correct } from "./correct.js";

const BUSY = { teaching: "Teaching: it takes some seconds, and the server answers meanwhile …", grouping: "Grouping the unknown photos …", loading: "Loading the model …" };
const SHOWN = 12; // photos of a group
const pictures = new Map(); // addresses of thumbnails by the number of the photo
let hooks = null, found = null, polling = 0;

export const lessonsShown = () => !byId("lessons").hidden;

export function beginLessons(given) {
  hooks = given;
}

// How many corrections wait is said in the head of the page.
export function showWaiting(state) {
  found = state;
  byId("teach-open").textContent = state.waiting ? `Teach (${state.waiting})` : "Teach";
  if (lessonsShown()) render();
}

export const askWaiting = async () => showWaiting(await api("/v1/lessons"));

export async function showLessons() {
  byId("lessons").hidden = false;
  byId("lessons-title").focus({ preventScroll: true });
  if (found) render();
  await asked(() => api("/v1/lessons"));
}

export function leaveLessons() {
  byId("lessons").hidden = true;
  clearTimeout(polling);
}

// Asks, shows the answer, and asks again while the server is busy.
async function asked(question) {
  clearTimeout(polling);
  show("lessons-problem", "");
  try {
    const before = found?.busy, version = hooks.version();
    showWaiting(await question());
    if (found.busy) polling = setTimeout(() => asked(() => api("/v1/lessons")), 700);
    else if (before) announce(found.problem || { teaching: "The lesson is ready: look at what it changes, then use it.", grouping: "The photos are grouped.", loading: "The model answers now." }[before]);
    if (found.version !== version) await hooks.switched();
  } catch (error) {
    if (error.needsToken) hooks.needsToken(error, () => asked(question));
    else show("lessons-problem", error.message);
  }
}

const post = (path, fields = {}) => asked(() => api(path, { method: "POST", body: formFields(fields) }));

function picture(id) {
  const image = html("img", { alt: "", width: 72, height: 72, loading: "lazy" });
  const known = pictures.get(id) || ask(`/v1/verdicts/image?id=${id}`).then((answer) => answer.blob()).then((blob) => URL.createObjectURL(blob));
  pictures.set(id, known);
  known.then((address) => { image.src = address; }).catch(() => pictures.delete(id)); // it was removed in the meantime
  return image;
}

function render() {
  const { busy, problem, cannot, waiting, few, corrections, novel, groups, lessons, version } = found;
  byId("lessons-busy").hidden = !busy;
  byId("lessons-busy-words").textContent = busy ? BUSY[busy] : "";
  if (problem) show("lessons-problem", problem);
  const needs = Object.entries(few).map(([name, more]) => `${name} needs ${count(more, "more photo")}`);
  const learned = corrections.length - waiting, both = learned ? ` wait to be learned, ${learned} ${learned === 1 ? "is" : "are"} learned.` : " wait to be learned.";
  byId("waiting-corrections").textContent = corrections.length
    ? `${waiting ? `${count(waiting, "correction")}${waiting === 1 ? both.replace("wait", "waits") : both}` : `${count(learned, "correction")}, all of them learned.`}${needs.length ? ` A new class needs five photos: ${listed(needs, "and")}.` : ""}`
    : "None yet. Open a photo and say what it is, or name a group of unknown photos.";
  show("lessons-cannot", cannot || "");
  disable("teach-now", Boolean(busy || cannot || !waiting));
  disable("group-now", Boolean(busy || !novel));
  fill("corrections", found.corrections, showCorrections);
  byId("novel-words").textContent = novel ? `${count(novel, "stored photo")} ${novel === 1 ? "is" : "are"} unlike everything that the model knows.` : "No stored photo is novel.";
  fill("groups", [groups, found.singles], showGroups);
  fill("models", [lessons, version, busy], showModels);
}

// A list is drawn again only if it has changed: what someone is typing into it stays.
const drawn = {};
function fill(id, content, draw) {
  const text = JSON.stringify(content);
  if (drawn[id] === text) return;
  drawn[id] = text;
  draw(byId(id));
}

function disable(id, off) {
  if (off) byId(id).setAttribute("aria-disabled", "true"); // a disabled one would lose the focus
  else byId(id).removeAttribute("aria-disabled");
}

function showCorrections(list) {
  const items = [...found.corrections].sort((one, other) => other.waiting - one.waiting).map(({ id, said, class: name, waiting }) => {
    const back = html("button", { className: "link", textContent: "Take back", ariaLabel: `Take back that photo ${id} is ${name}` });
    back.addEventListener("click", () => asked(() => correct([id], "")));
    return html("li", {}, picture(id), html("div", {}, html("b", { textContent: name }), html("br"), html("span", { className: "muted", textContent: said === name ? "as the model said" : `instead of ${said}` }),
      html("br"), waiting ? back : html("span", { className: "muted", textContent: "learned" })));
  });
  list.replaceChildren(...items);
  byId("corrections-fold").hidden = !items.length;
}

// A photo that can be chosen; all of a group are at first.
function choice(id, checked) {
  const box = html("input", { type: "checkbox", value: id, checked, ariaLabel: `Photo ${id}` });
  return html("label", { className: "pick" }, box, picture(id));
}

function showGroups(list) {
  const { groups, singles } = found, all = (groups || []).map((group) => ({ ...group, checked: true }));
  if (singles.length) all.push({ name: "In no group", ids: singles, nearest: "", checked: false });
  list.replaceChildren(...all.map(({ name, ids, nearest, checked }, i) => {
    const input = html("input", { id: `group-${i}`, maxLength: 100, autocomplete: "off", required: true });
    input.setAttribute("list", "class-names");
    const form = html("form", {}, html("div", { className: "pictures" }, ...ids.slice(0, SHOWN).map((id) => choice(id, checked))),
      ids.length > SHOWN ? html("details", {}, html("summary", { textContent: `${ids.length - SHOWN} more` }), html("div", { className: "pictures" }, ...ids.slice(SHOWN).map((id) => choice(id, checked)))) : "",
      html("label", { htmlFor: input.id, textContent: "The chosen photos are" }), input, html("button", { className: "plain", textContent: "Save" }));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const chosen = [...form.querySelectorAll(":checked")].map(({ value }) => value);
      if (input.value.trim() && chosen.length) asked(() => correct(chosen, input.value));
    });
    return html("li", { className: "card" }, html("h3", { textContent: `${name}: ${count(ids.length, "photo")}` }), nearest ? html("p", { className: "muted", textContent: `Most like ${nearest}.` }) : "", form);
  }));
  show("no-groups", groups && !groups.length ? "These photos form no groups of five or more." : "");
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function showModels(list) {
  const { lessons, version, busy } = found;
  const start = { version: 0, photos: {}, classes: [], sentences: [], recalls: [] };
  list.replaceChildren(...[start, ...lessons].reverse().map((lesson) => {
    const used = lesson.version === version, name = lesson.version ? `Lesson ${lesson.version}` : "As the server was started";
    const button = html("button", { className: used ? "plain" : "", textContent: used ? "In use" : "Use it", ariaLabel: used ? `${name} is in use` : `Use ${name}` });
    if (used || busy) button.setAttribute("aria-disabled", "true");
    button.addEventListener("click", () => { if (!button.hasAttribute("aria-disabled")) post("/v1/lessons/use", { version: lesson.version }); });
    return html("li", { className: "card" }, html("div", { className: "bar" }, html("h3", { textContent: name }), html("div", { className: "actions" }, button)), ...words(lesson));
  }));
}

function words({ version, made, photos, sentences, recalls }) {
  if (!version) return [html("p", { className: "muted", textContent: "Without any correction." })];
  const taught = Object.entries(photos).map(([name, photographs]) => `${name} from ${count(photographs, "photo")}`);
  const day = new Date(made).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
  const [before, after] = ["before", "after"].map((key) => `${(100 * mean(recalls.map((row) => row[key]))).toFixed(1)} %`);
  const change = before === after ? `stays at ${after}` : `changes from ${before} to ${after}`;
  const price = recalls.length ? `On held-out photos, mean recall of the classes that it was trained on ${change}.` : "What it changes on held-out photos is unknown.";
  const rows = recalls.map((row) => html("tr", {}, html("td", { textContent: row.class }), html("td", { textContent: percent(row.before) }), html("td", { textContent: percent(row.after) })));
  const head = ["class", "before", "after"].map((word) => html("th", { scope: "col", textContent: word }));
  const table = html("table", { className: "near" }, html("thead", {}, html("tr", {}, ...head)), html("tbody", {}, ...rows));
  const fold = html("details", {}, html("summary", { textContent: "All numbers" }), html("ul", {}, ...sentences.map((sentence) => html("li", { textContent: unbroken(sentence) }))), rows.length ? table : "");
  return [html("p", { textContent: unbroken(`Taught ${listed(taught, "and")}. ${price}`) }), html("p", { className: "muted", textContent: day }), fold];
}

for (const [id, path] of [["teach-now", "/v1/lessons"], ["group-now", "/v1/groups"]]) {
  byId(id).addEventListener("click", (event) => { if (!event.currentTarget.hasAttribute("aria-disabled")) post(path); });
}

