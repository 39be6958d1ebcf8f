// The page: one image in, one judgement out.

import { api, hasToken, setToken } from "./client.js";
import { badge, byId, capital, coloured, html, listed, percent, ranked, short, signed, unbroken, verdictOf } from "./dom.js";
import { showDrift } from "./drift.js";
import { coloursOf, drawMap, drawRamp, inWords, rangeOf } from "./maps.js";
import { decisionSpace, histogram, spaceLegend } from "./plots.js";

let model = null;
let current = null; // the file that is shown
let asked = 0; // the number of the newest question; older answers are dropped
let afterToken = null;

function askForToken(wrong, again) {
  afterToken = again;
  byId("token-form").hidden = false;
  byId("token-wrong").textContent = wrong ? "This token is not correct." : "";
  byId("token").focus();
}

function show(id, text) {
  byId(id).textContent = text;
  byId(id).hidden = text === "";
}

// For screen readers, which follow a place that was there before its words were.
function announce(text) {
  byId("announcer").textContent = text;
}

async function start() {
  try {
    if ((await api("/healthz")).needs_token && !hasToken()) return askForToken(false, start);
    model = (await api("/v1/models")).models[0];
  } catch (error) {
    return error.needsToken ? askForToken(error.wrong, start) : show("problem", error.message);
  }
  const { limits } = model, [, height, width] = model.image_shape;
  const kind = { resnet: "a ResNet", photo: "a photo model", adopted: "an adopted classifier" }[model.kind] || "a generative classifier";
  byId("model").textContent = `${model.name} · ${kind} of ${model.classes.length} classes`;
  byId("pick-hint").textContent = `${known()}\nImages are scaled to ${width} × ${height} pixels. Files may have up to ${limits.megabytes} MB and ${short(limits.pixels / 1e6)} million pixels.`;
  byId("verdicts").replaceChildren(...model.verdicts.map((each) =>
    html("li", {}, coloured(html("span", { className: "badge" }, badge(each)), each), html("div", {}, html("b", { textContent: `${capital(each.word)}.` }), ` ${each.sentence}`))));
  byId("can").textContent = model.can.length ? `The page also explains why: it shows ${listed(model.can, "and")}.` : "";
  byId("notes").replaceChildren(...model.cannot.map((each) => html("li", { textContent: each })));
  byId("notes").hidden = model.cannot.length === 0;
  byId("kept").textContent = model.stores_images ? "which stores it" : "which does not store it";
  byId("last").hidden = !model.stores_images;
  await showDrift();
}

function known() {
  const all = model.classes, some = 8;
  if (all.length <= 10) return `The model knows ${listed(all, "and")}.`;
  const chosen = Array.from({ length: some }, (_, i) => all[Math.floor(((i + 0.5) * all.length) / some)]);
  return `The model knows ${all.length} classes, for example ${listed(chosen, "and")}.`;
}

async function examine(file) {
  if (!model) await start();
  if (!model) { // the page says why
    if (!byId("token-form").hidden) afterToken = () => start().then(() => examine(file));
    return;
  }
  const question = ++asked;
  show("problem", "");
  byId("guide").hidden = true;
  byId("result").ariaBusy = "true"; // the last one stays until there is a new one
  show("waiting", `Examining ${file.name || "the image"} …`);
  announce(byId("waiting").textContent);
  try {
    if (file.size > model.limits.megabytes * 1e6) throw new Error(`The file is larger than ${model.limits.megabytes} MB: send a smaller one.`);
    const form = new FormData();
    form.append("file", file, file.name || "pasted");
    const answer = await api("/v1/examine?explain=true", { method: "POST", body: form });
    if (question !== asked) return;
    const [found] = answer.results;
    if (found.status === "unusable") throw new Error(found.error);
    current = file;
    await present(found);
    showDrift(); // nobody waits for it
  } catch (error) {
    if (question !== asked) return;
    byId("guide").hidden = false;
    byId("result").hidden = true;
    document.body.classList.remove("judged");
    announce("");
    if (error.needsToken) askForToken(error.wrong, () => start().then(() => examine(file)));
    else show("problem", error.message);
  } finally {
    if (question === asked) {
      show("waiting", "");
      byId("result").ariaBusy = "false";
    }
  }
}

async function present(found) {
  const picture = new Image();
  picture.src = `data:image/png;base64,${found.seen}`;
  await picture.decode();
  const seen = byId("seen");
  seen.width = picture.width;
  seen.height = picture.height;
  seen.getContext("2d").drawImage(picture, 0, 0);
  seen.setAttribute("aria-label", `The image as the model sees it, ${picture.width} by ${picture.height} pixels`);
  document.body.classList.toggle("photo", ["photo", "adopted"].includes(model.kind));
  if (model.kind === "photo") await presentPhoto(seen);

  const thumbnail = byId("thumbnail");
  URL.revokeObjectURL(thumbnail.src);
  thumbnail.src = URL.createObjectURL(current);
  thumbnail.hidden = false;
  document.body.classList.add("judged");
  byId("result").hidden = false;
  presentVerdict(found);
  presentClasses(found);
  presentTypicality(found);
  const { explanation } = found;
  for (const id of ["between", "near"]) byId(id).hidden = !explanation?.decision_space;
  for (const id of ["heat-controls", "heat"]) byId(id).hidden = !explanation?.heatmaps;
  byId("change").hidden = !explanation?.decision_space || !model.abilities.includes("invert");
  byId("known").hidden = !explanation?.nearest_photos;
  byId("seen-how").hidden = Boolean(explanation?.heatmaps);
  byId("look").classList.toggle("plain", !explanation?.heatmaps);
  byId("look-title").textContent = explanation?.heatmaps ? "What it looks at" : "What it saw";
  if (explanation) presentExplanation(found, explanation);
  else seen.classList.remove("grey");
}

// The whole photo in its own resolution, with the heatmap over the square that the model sees.
async function presentPhoto(seen) {
  const heat = byId("heat"), most = 896;
  Object.assign(heat.style, { left: "0", top: "0", width: "100%", height: "100%" });
  const photo = await createImageBitmap(current).catch(() => null); // a format that browsers don't show
  if (!photo) return;
  const scale = Math.min(1, most / Math.max(photo.width, photo.height));
  seen.width = Math.round(photo.width * scale);
  seen.height = Math.round(photo.height * scale);
  seen.getContext("2d").drawImage(photo, 0, 0, seen.width, seen.height);
  seen.setAttribute("aria-label", "The photo. The model sees the square in its middle.");
  const side = Math.min(seen.width, seen.height), share = (length) => `${(100 * side) / length}%`;
  const rest = (length) => `${(50 * (length - side)) / length}%`;
  Object.assign(heat.style, { left: rest(seen.width), top: rest(seen.height), width: share(seen.width), height: share(seen.height) });
}

function presentKnown(known) {
  const item = (each) => {
    const picture = new Image();
    picture.src = `data:image/jpeg;base64,${each.image}`;
    picture.alt = `A known photo of ${each.class}`;
    return html("li", {}, picture, html("p", {}, html("b", { textContent: each.class })));
  };
  byId("known-nearest").replaceChildren(...known.nearest.map(item));
  byId("known-of-instead").replaceChildren(...known.of_instead.map(item));
  byId("known-instead").textContent = known.of_instead.length ? `If it were ${known.instead} instead: the nearest photos of ${known.instead}` : "";
}

function presentVerdict(found) {
  const verdict = verdictOf(model, found.verdict), names = found.classes || [];
  const many = `no common kind: ${names.slice(0, 5).join(", ")} …`;
  const list = found.node ? `some ${found.node} (${found.node_leaves} classes)` : found.class_count > 5 ? many : listed(names, "or");
  const meaning = (found.plain || verdict.sentence || "").replace(/\.$/, "");
  let word = `${found.label}, ${percent(found.confidence)}`;
  let sentence = "This is the most probable class. This model can't tell whether the image is of a kind it knows.";
  if (verdict.word) {
    word = `${capital(verdict.word)}: ${list || meaning.charAt(0).toLowerCase() + meaning.slice(1)}`;
    sentence = `${meaning} (p = ${short(found.p_value ?? 0)}). ` +
      (list ? `The most probable class is ${found.label} (posterior ${percent(found.confidence)}).` : `Don't trust the class ${found.label}.`);
  }
  const section = coloured(byId("verdict"), verdict);
  if (verdict.word) section.dataset.kind = verdict.kind;
  else delete section.dataset.kind;
  byId("verdict-badge").replaceChildren(badge(verdict));
  byId("verdict-word").textContent = word;
  byId("verdict-sentence").textContent = unbroken(sentence);
  announce(`${word}. ${sentence}`);
}

function presentClasses(found) {
  const { classes } = found;
  byId("classes").replaceChildren(...ranked(found.posterior).map(([label, posterior]) => {
    const out = classes !== null && !classes.includes(label);
    const fill = html("i");
    fill.style.width = `${100 * posterior}%`;
    const name = html("b", {}, label);
    if (out && classes.length) name.append(html("span", { className: "tag", textContent: "  ruled out" }));
    return html("li", { className: out ? "out" : "" }, html("div", { className: "name" }, name, html("span", { textContent: percent(posterior) })),
      html("div", { className: "track" }, fill));
  }));
  const levels = model.held_out;
  byId("classes-how").textContent = unbroken("Posterior probabilities, given that the image shows one of the model's classes." +
    (classes && classes.length ? ` Classes without "ruled out" are in the class set: at least ${percent(1 - levels.error)} of typical images have their true class in it.` : "") +
    (classes && !classes.length ? " They mean little for such an image." : ""));
}

// The word for images that no class fits: the verdict that needs most attention.
const unknown = () => model.verdicts[0].word;

function presentTypicality(found) {
  const { held_out: heldOut } = model;
  byId("typical").hidden = heldOut === null || found.p_value === null;
  if (byId("typical").hidden) return;
  fitted("histogram", (width) => histogram(heldOut, found.p_value, width, unknown()));
  byId("histogram-how").textContent = unbroken(`${percent(found.p_value)} of the held-out images are at least as unusual as this one (blue bars)${found.class_p_value === null ? "." : ";"} ` +
    `${found.class_p_value === null ? "" : `among those also predicted as ${found.label}, ${percent(found.class_p_value)}. `}Images with ${percent(heldOut.novelty)} or less count as ${unknown()}.`);
}

const plots = new Map(); // how to draw what is shown, at any width

function fitted(id, draw) {
  plots.set(id, draw);
  const width = Math.min(Math.max(byId(id).clientWidth, 260), 520);
  byId(id).replaceChildren(draw(width));
}

function uncertainty({ expected_uncertainty: expected, measured_uncertainty: measured }) {
  const differs = measured !== null && Math.max(expected, measured) > 1.5 * Math.min(expected, measured);
  return percent(expected) + (differs ? ` (${percent(measured)})` : "");
}

function presentExplanation(found, explanation) {
  if (explanation.decision_space) presentSpace(found, explanation);
  if (explanation.heatmaps) presentMaps(explanation.heatmaps);
  else byId("seen").classList.remove("grey");
  if (explanation.nearest_photos) presentKnown(explanation.nearest_photos);
  byId("towards").replaceChildren(...model.classes.filter((name) => name !== found.label).map((name) => html("option", { value: name, textContent: name })));
  byId("towards").value = ranked(found.posterior)[1][0];
  byId("change-result").hidden = true;
  show("change-problem", "");
}

function presentSpace(found, explanation) {
  const space = explanation.decision_space, odd = found.classes?.length === 0 ? unknown() : "";
  fitted("space", (width) => decisionSpace(space, width, odd));
  byId("reading").textContent = unbroken(explanation.summary);
  byId("space-legend").replaceChildren(...spaceLegend(space, odd));
  byId("neighbours").replaceChildren(...explanation.nearest_classes.map((each) => html("tr", {}, html("td", { textContent: each.class }),
    html("td", { textContent: each.distance.toFixed(1) }), html("td", { textContent: uncertainty(each) }))));
  byId("near-how").textContent = `Distance of each class from ${found.label}, in standard deviations, and the mean uncertainty of a decision between the two` +
    (explanation.nearest_classes.some((each) => each.measured_uncertainty !== null) ? "; in parentheses the one measured on held-out images, where it differs by more than a factor of 1.5." : ".");
}

function presentMaps(given) {
  const maps = withDifference(given), photo = maps.saliency_nats === null;
  if (photo) {
    byId("map-how").textContent = "Red places add to the score of a class, blue ones take away from it. Together they add up to the score: " +
      "the logit of the class minus the mean of all logits, less that of the average photo. A map is not the cause of a decision, since every position has seen the photo around it.";
  }
  const choices = [["none", "image alone"], ...(photo ? [] : [["saliency", "saliency"]]), ...maps.classes.map((each, i) => [String(i), each.not ? each.class : `${each.class} (${percent(Math.exp(each.log_posterior_nats))})`])];
  byId("maps").replaceChildren(...choices.map(([value, words]) => {
    const input = html("input", { type: "radio", name: "map", value, checked: value === "0" });
    input.addEventListener("change", () => overlay(maps, value));
    return html("label", {}, input, words);
  }));
  overlay(maps, "0");
}

// Why the first class and not the second: the difference of their maps, which adds up to the difference of their scores.
function withDifference(maps) {
  if (maps.saliency_nats !== null || maps.classes.length < 2) return maps;
  const [first, second] = maps.classes;
  const values = first.values_nats.map((row, i) => row.map((value, j) => value - second.values_nats[i][j]));
  const difference = { class: `${first.class}, not ${second.class}`, not: true, values_nats: values,
    score_nats: first.score_nats - second.score_nats, baseline_nats: first.baseline_nats - second.baseline_nats };
  return { ...maps, classes: [...maps.classes, difference] };
}

function overlay(maps, choice) {
  const off = choice === "none", kind = choice === "saliency" ? "saliency" : "class";
  byId("heat").hidden = byId("scale").hidden = off;
  byId("seen").classList.toggle("grey", !off);
  byId("opacity").disabled = off;
  if (off) {
    byId("map-words").textContent = "The image as the model sees it.";
    byId("map-table").replaceChildren();
    return;
  }
  const values = kind === "saliency" ? maps.saliency_nats : maps.classes[Number(choice)].values_nats;
  const name = kind === "saliency" ? "saliency" : maps.classes[Number(choice)].class;
  const range = rangeOf(kind, maps), stops = coloursOf(kind);
  drawMap(byId("heat"), values, stops, range);
  drawRamp(byId("ramp"), stops);
  byId("scale-low").textContent = kind === "saliency" ? range[0].toFixed(0) : `${signed(range[0])} against`;
  byId("scale-high").textContent = kind === "saliency" ? range[1].toFixed(0) : `for ${signed(range[1])}`;
  byId("scale-unit").textContent = "nats";
  const chosen = maps.classes[Number(choice)], score = chosen?.score_nats ?? null;
  byId("map-words").textContent = unbroken(inWords(kind, name, values) +
    (score === null ? "" : ` The average photo has ${signed(chosen.baseline_nats)}: the score is ${signed(score)} nats.`));
  byId("map-table").replaceChildren(...values.map((row) => html("tr", {}, ...row.map((value) => html("td", { textContent: signed(value) })))));
}

async function change(event) {
  event.preventDefault();
  const question = asked, button = byId("change-form").querySelector("button");
  if (button.getAttribute("aria-disabled") === "true") return;
  const form = new FormData();
  form.append("file", current, current.name || "pasted");
  form.append("towards", byId("towards").value);
  form.append("target", byId("target").value);
  show("change-problem", "");
  byId("change-result").hidden = true;
  byId("change-waiting").hidden = false;
  announce(byId("change-waiting").textContent);
  button.setAttribute("aria-disabled", "true"); // a disabled one would lose the focus
  try {
    const { result } = await api("/v1/counterfactual", { method: "POST", body: form });
    if (question !== asked) return;
    if (result.status !== "changed") throw new Error(result.error);
    await presentChange(result);
  } catch (error) {
    if (question !== asked) return;
    if (error.needsToken) askForToken(error.wrong, () => byId("change-form").requestSubmit());
    else show("change-problem", error.message);
  } finally {
    byId("change-waiting").hidden = true;
    button.removeAttribute("aria-disabled");
  }
}

async function presentChange(result) {
  const pictures = await Promise.all(result.steps.map(async (step) => {
    const picture = new Image();
    picture.src = `data:image/png;base64,${step.image}`;
    await picture.decode();
    return picture;
  }));
  const items = result.steps.map((step, i) => {
    pictures[i].alt = i ? `Step ${i} of the change` : "The image itself";
    return html("li", {}, pictures[i], html("p", {}, html("b", { textContent: `${result.class} ${percent(step.posterior)}` }), html("br"), `${result.class_before} ${percent(step.posterior_before)}`));
  });
  items.push(html("li", {}, difference(pictures[0], pictures.at(-1)), html("p", {}, html("b", { textContent: "the change" }), html("br"), "grey: none")));
  byId("steps").replaceChildren(...items);
  byId("change-words").textContent = `From ${result.class_before} to ${result.class} with ${percent(result.posterior)}: ` +
    `${short(result.length_in_standard_deviations)} standard deviations through latent space. ` +
    (result.reached ? "" : "No 8-bit image on the path meets the target exactly; this one is closest. ") +
    `The changed image takes ${result.bits_per_dim[1].toFixed(2)} bits per dimension, the original ${result.bits_per_dim[0].toFixed(2)}.`;
  byId("change-result").hidden = false;
  announce(byId("change-words").textContent);
}

function difference(before, after) {
  const canvas = html("canvas", { width: before.width, height: before.height });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", "The difference between the image and the changed one, enlarged");
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const pixels = (picture) => {
    context.drawImage(picture, 0, 0);
    return context.getImageData(0, 0, canvas.width, canvas.height).data;
  };
  const first = pixels(before), second = pixels(after), shown = context.createImageData(canvas.width, canvas.height);
  let largest = 1;
  for (let i = 0; i < first.length; i++) largest = Math.max(largest, Math.abs(second[i] - first[i]));
  for (let i = 0; i < first.length; i++) shown.data[i] = i % 4 === 3 ? 255 : 128 + (127 * (second[i] - first[i])) / largest;
  context.putImageData(shown, 0, 0);
  return canvas;
}

function take(files) {
  if (files && files.length) examine(files[0]);
}

byId("pick").addEventListener("change", (event) => { take(event.target.files); });
byId("pick").addEventListener("click", (event) => { event.target.value = ""; }); // the same file again is a new question
document.addEventListener("paste", (event) => take(event.clipboardData.files));
document.addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("over"); });
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("over"); });
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("over");
  take(event.dataTransfer.files);
});
byId("opacity").addEventListener("input", (event) => {
  byId("heat").style.opacity = event.target.value / 100;
  byId("opacity-value").textContent = `${event.target.value} %`;
});
byId("heat").style.opacity = 0.8;
byId("thumbnail").addEventListener("error", (event) => { event.target.hidden = true; }); // a format that browsers don't show
let resized = 0;
window.addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => plots.forEach((draw, id) => fitted(id, draw)), 100);
});
byId("change-form").addEventListener("submit", change);
byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setToken(byId("token").value.trim());
  byId("token").value = "";
  byId("token-form").hidden = true;
  byId("pick").focus();
  afterToken();
});
start();
