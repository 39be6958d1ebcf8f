// Why the model says it, on request: heatmaps over the photo, the decision space, the nearest classes and photos.

import { api, formOf } from "./client.js";
import { announce, byId, html, percent, ranked, show, signed, unbroken } from "./dom.js";
import { coloursOf, drawMap, drawRamp, inWords, rangeOf } from "./maps.js";
import { decisionSpace, fitted, spaceLegend } from "./plots.js";

const PARTS = ["heat-controls", "heat", "between", "near", "known", "change", "change-result", "notes"];
let asked = 0;

export function hideReasons() {
  asked++;
  for (const id of PARTS) byId(id).hidden = true;
  byId("seen").classList.remove("grey");
  byId("why").hidden = false;
  byId("why").removeAttribute("aria-disabled");
  byId("why-waiting").hidden = true;
  for (const id of ["why-problem", "change-problem"]) show(id, "");
}

// Asks the server once; the photo keeps the answer. It has been judged before, so it does not count again.
export async function askWhy(model, photo, needsToken) {
  if (byId("why").getAttribute("aria-disabled") === "true") return;
  const question = ++asked;
  byId("why").setAttribute("aria-disabled", "true"); // a disabled one would lose the focus
  byId("why-waiting").hidden = false;
  announce(byId("why-waiting").textContent);
  show("why-problem", "");
  try {
    const { results: [result] } = await api("/v1/examine?explain=true&again=true", { method: "POST", body: formOf([photo.file]) });
    if (result.status === "unusable") throw new Error(result.error);
    photo.explanation = { ...result.explanation, seen: result.seen };
    if (question === asked) showReasons(model, photo);
  } catch (error) {
    if (question !== asked) return;
    if (error.needsToken) needsToken(error);
    else show("why-problem", error.message);
  } finally {
    if (question === asked) {
      byId("why").removeAttribute("aria-disabled");
      byId("why-waiting").hidden = true;
    }
  }
}

export function showReasons(model, photo) {
  const { result, explanation } = photo, { decision_space: space, nearest_photos: known } = explanation;
  byId("why").hidden = true;
  byId("notes").hidden = model.cannot.length === 0;
  for (const id of ["between", "near"]) byId(id).hidden = !space;
  if (space) showSpace(model, result, explanation);
  showMaps(model, explanation);
  byId("known").hidden = !known;
  if (known) showKnown(known);
  byId("change").hidden = !space || !model.abilities.includes("invert");
  byId("towards").replaceChildren(...model.classes.filter((name) => name !== result.label).map((name) => html("option", { value: name, textContent: name })));
  if (!byId("change").hidden) byId("towards").value = ranked(result.posterior)[1][0];
}

function showSpace(model, result, explanation) {
  const space = explanation.decision_space, odd = result.classes?.length === 0 ? model.verdicts[0].word : "";
  fitted("space", (width) => decisionSpace(space, width, odd));
  byId("reading").textContent = unbroken(explanation.summary);
  byId("space-legend").replaceChildren(...spaceLegend(space, odd));
  byId("neighbours").replaceChildren(...explanation.nearest_classes.map((near) => html("tr", {}, html("td", { textContent: near.class }),
    html("td", { textContent: near.distance.toFixed(1) }), html("td", { textContent: uncertainty(near) }))));
  byId("near-how").textContent = `Distance of each class from ${result.label}, in standard deviations, and the mean uncertainty of a decision between the two` +
    (explanation.nearest_classes.some((near) => near.measured_uncertainty !== null) ? "; in parentheses the one measured on held-out images, where it differs by more than a factor of 1.5." : ".");
}

function uncertainty({ expected_uncertainty: expected, measured_uncertainty: measured }) {
  const differs = measured !== null && Math.max(expected, measured) > 1.5 * Math.min(expected, measured);
  return percent(expected) + (differs ? ` (${percent(measured)})` : "");
}

function showKnown(known) {
  const item = (near) => {
    const picture = html("img", { src: `data:image/jpeg;base64,${near.image}`, alt: `A known photo of ${near.class}` });
    return html("li", {}, picture, html("p", {}, html("b", { textContent: near.class })));
  };
  byId("known-nearest").replaceChildren(...known.nearest.map(item));
  byId("known-of-instead").replaceChildren(...known.of_instead.map(item));
  byId("known-instead").textContent = known.of_instead.length ? `If it were ${known.instead} instead: the nearest photos of ${known.instead}` : "";
}

// The part of the photo that the model sees, in percent of the photo's sides.
function partSeen(model) {
  const { naturalWidth: width, naturalHeight: height } = byId("seen"), [, rows, columns] = model.image_shape;
  const margin = width === columns && height === rows ? 1 : model.margin;
  const scale = Math.min(width / columns, height / rows) / margin, share = (length, side) => Math.min(100, (100 * scale * side) / length);
  const [w, h] = [share(width, columns), share(height, rows)];
  return { left: `${(100 - w) / 2}%`, top: `${(100 - h) / 2}%`, width: `${w}%`, height: `${h}%` };
}

async function showMaps(model, explanation) {
  const question = asked, maps = explanation.heatmaps && withDifference(explanation.heatmaps), choices = [["none", "nothing"]];
  if (explanation.seen) choices.push(["seen", "what the model sees"]);
  if (maps) {
    if (maps.saliency_nats !== null) choices.push(["saliency", "saliency"]);
    else {
      byId("map-how").textContent = "Red places add to the score of a class, blue ones take away from it. Together they add up to the score: " +
        "the logit of the class minus the mean of all logits, less that of the average photo. A map is not the cause of a decision, since every position has seen the photo around it.";
    }
    choices.push(...maps.classes.map((map, i) => [String(i), map.not ? map.class : `${map.class} (${percent(Math.exp(map.log_posterior_nats))})`]));
  }
  const first = maps ? "0" : "seen";
  byId("maps").replaceChildren(...choices.map(([value, words]) => {
    const input = html("input", { type: "radio", name: "map", value, checked: value === first });
    input.addEventListener("change", () => overlay(explanation, maps, value));
    return html("label", {}, input, words);
  }));
  await byId("seen").decode().catch(() => {});
  if (question !== asked) return;
  Object.assign(byId("heat").style, partSeen(model));
  byId("heat-controls").hidden = false;
  byId("map-how").hidden = !maps;
  overlay(explanation, maps, first);
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

async function overlay(explanation, maps, choice) {
  const isMap = !["none", "seen"].includes(choice), heat = byId("heat");
  heat.hidden = choice === "none";
  heat.classList.toggle("pixels", choice === "seen");
  byId("scale").hidden = byId("map-table").parentElement.parentElement.hidden = !isMap;
  byId("seen").classList.toggle("grey", isMap);
  byId("opacity").disabled = choice === "none";
  if (!isMap) {
    byId("map-words").textContent = choice === "none" ? "The photo alone." : "The part of the photo that the model sees, in its resolution.";
    if (choice === "seen") await drawSeen(heat, explanation.seen);
    return;
  }
  const kind = choice === "saliency" ? "saliency" : "class", chosen = maps.classes[Number(choice)];
  const values = kind === "saliency" ? maps.saliency_nats : chosen.values_nats, name = chosen?.class ?? kind;
  const range = rangeOf(kind, maps), stops = coloursOf(kind), score = chosen?.score_nats ?? null;
  drawMap(heat, values, stops, range);
  drawRamp(byId("ramp"), stops);
  byId("scale-low").textContent = kind === "saliency" ? range[0].toFixed(0) : `${signed(range[0])} against`;
  byId("scale-high").textContent = kind === "saliency" ? range[1].toFixed(0) : `for ${signed(range[1])}`;
  byId("scale-unit").textContent = "nats";
  byId("map-words").textContent = unbroken(inWords(kind, name, values) +
    (score === null ? "" : ` The average photo has ${signed(chosen.baseline_nats)}: the score is ${signed(score)} nats.`));
  byId("map-table").replaceChildren(...values.map((row) => html("tr", {}, ...row.map((value) => html("td", { textContent: signed(value) })))));
}

async function drawSeen(canvas, png) {
  const picture = html("img", { src: `data:image/png;base64,${png}` });
  await picture.decode();
  Object.assign(canvas, { width: picture.width, height: picture.height });
  canvas.getContext("2d").drawImage(picture, 0, 0);
}

byId("opacity").addEventListener("input", (event) => {
  byId("heat").style.opacity = event.target.value / 100;
  byId("opacity-value").textContent = `${event.target.value} %`;
});
byId("heat").style.opacity = 0.8;
