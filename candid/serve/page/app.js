// The page: photos in, a table of verdicts and each photo alone out.

import { api, ask, hasToken, setServed, setToken } from "./client.js";
import { beginCorrecting } from "./correct.js";
import { announce, badge, byId, capital, coloured, count, html, listed, short, show } from "./dom.js";
import { change } from "./change.js";
import { showDrift } from "./drift.js";
import { askWaiting, beginLessons, leaveLessons, lessonsShown, showLessons, showWaiting } from "./lessons.js";
import { add, askAgain, clear, filesOf, makeThumbnail, photos } from "./photos.js";
import { run } from "./queue.js";
import { csv, download, page } from "./report.js";
import { leave, present, shownPhoto } from "./single.js";
import * as table from "./table.js";
import { askWhy } from "./why.js";

let model = null;
let afterToken = null;

function askForToken(wrong, again) {
  afterToken = again;
  byId("token-form").hidden = false;
  byId("token-wrong").textContent = wrong ? "This token is not correct." : "";
  byId("token").focus();
}

function stop(message, again = null) {
  show("problem", message);
  byId("stopped").hidden = message === "";
  byId("go-on").hidden = again === null;
  byId("go-on").onclick = again;
}

const tokenThen = (error, again) => askForToken(error.wrong, again);

async function start() {
  let models;
  try {
    if ((await api("/healthz")).needs_token && !hasToken()) return askForToken(false, start);
    models = (await api("/v1/models")).models;
  } catch (error) {
    return error.needsToken ? askForToken(error.wrong, start) : stop(error.message, start);
  }
  stop("");
  showChoice(models);
  showModel(models.find(({ name }) => name === byId("model-choice").value));
  showExamples();
  if (model.stores_images) askWaiting().catch(() => {});
  await showDrift();
  if (photos.length) go();
}

// Which of several models is asked.
function showChoice(models) {
  const chosen = model?.name ?? models[0].name;
  byId("model-place").hidden = models.length === 1;
  byId("model-choice").replaceChildren(...models.map(({ name }) => html("option", { value: name, textContent: name })));
  byId("model-choice").value = chosen;
  setServed(models.length > 1 ? chosen : "");
}

// Another model answers now: it judges the photos again.
async function switched() {
  const { models } = await api("/v1/models");
  showModel(models.find(({ name }) => name === byId("model-choice").value));
  askAgain();
  showDrift();
  table.render();
  if (photos.length) await judge();
}

function showModel(given) {
  model = given;
  const { limits } = model, [, height, width] = model.image_shape;
  const kind = { resnet: "a ResNet", photo: "a photo model", adopted: "an adopted classifier" }[model.kind] || "a generative classifier";
  byId("model").textContent = `${byId("model-place").hidden ? `${model.name} · ` : ""}${kind} of ${model.classes.length} classes${model.version ? ` · lesson ${model.version}` : ""}`;
  byId("pick-hint").textContent = `${classesInWords()}\nThe model sees ${width} × ${height} pixels. Files may have up to ${limits.megabytes} MB and ${short(limits.pixels / 1e6)} million pixels.`;
  byId("verdicts").replaceChildren(...model.verdicts.map((verdict) =>
    html("li", {}, coloured(html("span", { className: "badge" }, badge(verdict)), verdict), html("div", {}, html("b", { textContent: `${capital(verdict.word)}.` }), ` ${verdict.sentence}`))));
  byId("can").textContent = model.can.length ? `On request the page shows why: ${listed(model.can, "and")}.` : "";
  byId("why").textContent = model.can.length ? "Show why" : "Show what the model sees";
  byId("notes").replaceChildren(...model.cannot.map((sentence) => html("li", { textContent: sentence })));
  byId("kept").textContent = model.stores_images ? "which stores them" : "which does not store them";
  byId("last").hidden = !model.stores_images;
  table.begin(model, open);
  beginLessons({ version: () => model.version, switched, needsToken: tokenThen });
  beginCorrecting(model, (found, photo) => { showWaiting(found); table.refresh(photo); showAlone(); }, tokenThen);
}

function classesInWords() {
  const all = model.classes, some = 8;
  if (all.length <= 10) return `The model knows ${listed(all, "and")}.`;
  const chosen = Array.from({ length: some }, (_, i) => all[Math.floor(((i + 0.5) * all.length) / some)]);
  return `The model knows ${all.length} classes, for example ${listed(chosen, "and")}.`;
}

async function example(name) {
  const blob = await (await ask(`/v1/example?name=${encodeURIComponent(name)}`)).blob();
  return new File([blob], name, { type: blob.type });
}

async function showExamples() {
  byId("examples-place").hidden = model.examples.length === 0;
  const files = await Promise.all(model.examples.map(example)).catch(() => []);
  byId("examples").replaceChildren(...files.map((file) => {
    const picture = html("img", { src: URL.createObjectURL(file), alt: file.name.replace(/\.\w+$/, "") });
    const button = html("button", { className: "plain" }, picture);
    button.addEventListener("click", () => take([file]));
    return html("li", {}, button);
  }));
}

// One photo is shown at once, several as a table; what is no photo is named.
function take(files, others = []) {
  if (others.length) announceLeftOut(others);
  if (!files.length) return;
  const added = add(files);
  document.body.classList.add("judged");
  byId("guide").hidden = true;
  if (!model) return byId("token-form").hidden ? start() : undefined; // the photos wait for the token
  if (added.length === 1) open(added[0]);
  else showTable();
  go();
}

function announceLeftOut(others) {
  const names = others.slice(0, 5).map((file) => file.path || file.name);
  stop(`${count(others.length, "file")} left out, since they are no photos: ${names.join(", ")}${others.length > 5 ? " …" : ""}.`);
}

async function go() {
  if (byId("result").hidden && byId("list").hidden && !lessonsShown()) photos.length === 1 ? open(photos[0]) : showTable();
  await judge();
}

async function judge() {
  progress();
  try {
    await run(model.limits, changed);
    if (byId("go-on").hidden === false) stop("");
    if (photos.length > 1) announce(`${count(table.judged(), "photo")} examined.`);
    showDrift(); // nobody waits for it
    if (photos.some(({ state, version }) => state === "judged" && version !== model.version)) await switched();
  } catch (error) {
    byId("waiting").hidden = true;
    if (error.needsToken) askForToken(error.wrong, go);
    else stop(error.message, () => { stop(""); go(); });
  }
}

function changed(photo) {
  progress();
  if (photo) return table.refresh(photo);
  table.render();
  showAlone();
}

function showAlone() {
  const single = shownPhoto();
  if (single && !byId("result").hidden) present(model, single, orderWith(single));
}

function progress() {
  const finished = table.judged();
  byId("waiting").hidden = finished === photos.length;
  byId("waiting-words").textContent = photos.length === 1 ? `Examining ${photos[0].name} …` : `${finished} of ${count(photos.length, "photo")} examined …`;
  Object.assign(byId("progress"), { max: photos.length, value: finished });
}

function showTable(focus = null) {
  if (history.state?.lessons) history.replaceState(null, "");
  leave();
  leaveLessons();
  byId("list").hidden = photos.length === 0;
  byId("guide").hidden = photos.length > 0;
  document.body.classList.toggle("judged", photos.length > 0);
  table.render();
  if (focus) table.focusOn(focus);
}

// Going back from a photo is going back in the browser, too: on a phone, nothing else is expected.
function open(photo) {
  if (history.state?.lessons) history.replaceState({ photo: true }, "");
  if (!history.state?.photo) history.pushState({ photo: true }, "");
  byId("list").hidden = true;
  leaveLessons();
  table.render();
  present(model, photo, orderWith(photo));
  byId("photo-name").focus({ preventScroll: true });
  window.scrollTo(0, 0);
}

// A photo that the filter hides is still one of all.
const orderWith = (photo) => (table.shown().includes(photo) ? table.shown() : photos);

function step(by) {
  const photo = shownPhoto(), order = orderWith(photo), next = order[order.indexOf(photo) + by];
  if (!next) return;
  const focused = document.activeElement;
  present(model, next, order);
  if (!["previous", "next"].includes(focused?.id)) byId("photo-name").focus({ preventScroll: true });
}

const back = () => (history.state?.photo ? history.back() : showTable(shownPhoto()));
function teach() {
  if (!history.state?.lessons) history.pushState({ lessons: true }, "");
  leave();
  byId("list").hidden = byId("guide").hidden = true;
  document.body.classList.add("judged");
  window.scrollTo(0, 0);
  showLessons();
}

window.addEventListener("popstate", () => {
  if (history.state?.lessons) return lessonsShown() ? undefined : teach();
  if (!history.state?.photo || !shownPhoto()) showTable(shownPhoto());
});

function startAgain() {
  table.reset();
  clear();
  stop("");
  byId("waiting").hidden = true;
  showTable();
  byId("pick").focus();
}

const why = () => askWhy(model, shownPhoto(), (error) => askForToken(error.wrong, why));
document.body.classList.toggle("touch", navigator.maxTouchPoints > 0);
byId("pick").addEventListener("change", (event) => take([...event.target.files]));
byId("camera").addEventListener("change", (event) => take([...event.target.files]));
for (const id of ["pick", "camera"]) byId(id).addEventListener("click", (event) => { event.target.value = ""; }); // the same file again is a new question
document.addEventListener("paste", (event) => take([...event.clipboardData.files]));
document.addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("over"); });
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("over"); });
document.addEventListener("drop", async (event) => {
  event.preventDefault();
  document.body.classList.remove("over");
  const { files, others } = await filesOf(event.dataTransfer);
  take(files, others);
});
document.addEventListener("keydown", (event) => {
  if (byId("result").hidden || byId("help").open || event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.key === "Escape" && photos.length > 1) return back();
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by && !event.target.closest("input, select, textarea, .scroll")) {
    event.preventDefault();
    step(by);
  }
});
byId("back").addEventListener("click", back);
byId("previous").addEventListener("click", () => step(-1));
byId("next").addEventListener("click", () => step(1));
byId("why").addEventListener("click", why);
byId("csv").addEventListener("click", () => download(csv(), "text/csv", "candid.csv"));
byId("report").addEventListener("click", async () => {
  await Promise.all(photos.map((photo) => makeThumbnail(photo).catch(() => {}))); // those that are still to be made
  download(await page(model, table.kinds(), table.wordOf), "text/html", "candid.html");
});
byId("clear").addEventListener("click", startAgain);
byId("teach-open").addEventListener("click", teach);
byId("lessons-back").addEventListener("click", () => showTable());
byId("model-choice").addEventListener("change", (event) => {
  setServed(event.target.value);
  byId("examples-place").hidden = true;
  if (model.stores_images) askWaiting().catch(() => {});
  switched().catch((error) => stop(error.message));
});
byId("help-open").addEventListener("click", () => byId("help").showModal());
byId("help-close").addEventListener("click", () => byId("help").close());
byId("change-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const photo = shownPhoto();
  change(photo, () => shownPhoto() === photo, (error) => askForToken(error.wrong, () => byId("change-form").requestSubmit()));
});
byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setToken(byId("token").value.trim());
  byId("token").value = "";
  byId("token-form").hidden = true;
  byId("pick").focus();
  afterToken();
});
start();
