// One photo: first the photo itself, then the verdict and what it is made of.

import { announce, answerOf, badge, byId, capital, coloured, html, percent, ranked, short, showPromises, unbroken, verdictOf } from "./dom.js";
import { showCorrection } from "./correct.js";
import { done, pictureOf, stateOf } from "./photos.js";
import { fitted, histogram } from "./plots.js";
import { hideReasons, showReasons } from "./why.js";

const MOST_ZOOM = 3;
const COARSE = 100; // pixels: smaller photos are shown with sharp edges
let current = null, version = 0;

export const shownPhoto = () => current;

// The word for images that no class fits: the verdict that needs most attention.
const unknown = (model) => model.verdicts[0].word;

export function present(model, photo, order) {
  const other = photo !== current || photo.version !== version; // what one model saw is no reason of another one
  [current, version] = [photo, photo.version];
  document.body.classList.add("judged");
  byId("result").hidden = false;
  byId("result").ariaBusy = String(photo.state === "waiting");
  byId("photo-name").textContent = photo.name;
  const place = order.indexOf(photo);
  byId("steps-between").hidden = order.length < 2 && place >= 0;
  byId("place").textContent = place < 0 ? "" : `${place + 1} of ${order.length}`;
  byId("previous").setAttribute("aria-disabled", String(place <= 0));
  byId("next").setAttribute("aria-disabled", String(place < 0 || place === order.length - 1));
  if (other) hideReasons();
  if (other || (photo.shown === undefined && photo.state === "judged")) showPicture(photo);
  showVerdict(model, photo);
  const { result } = photo;
  for (const id of ["could-be", "why-place"]) byId(id).hidden = !result;
  showPromises("promises", result?.promises);
  showCorrection(model, photo);
  byId("typical").hidden = !result || model.held_out === null || result.p_value === null;
  if (!result) return;
  showClasses(result);
  if (!byId("typical").hidden) showTypicality(model, result);
  if (other && photo.explanation) showReasons(model, photo);
}

export function leave() {
  current = null;
  byId("result").hidden = true;
  hideReasons();
}

async function showPicture(photo) {
  const seen = byId("seen"), usable = photo.state === "judged";
  URL.revokeObjectURL(seen.src);
  seen.removeAttribute("src");
  byId("no-picture").hidden = true;
  byId("stack").hidden = true;
  const blob = await pictureOf(photo).catch(() => null);
  if (photo !== current) return;
  byId("no-picture").hidden = Boolean(blob) || !usable;
  if (!blob) return;
  seen.src = URL.createObjectURL(blob);
  seen.alt = `The photo ${photo.name}`;
  await seen.decode().catch(() => {});
  if (photo !== current) return;
  seen.classList.toggle("coarse", Math.max(seen.naturalWidth, seen.naturalHeight) <= COARSE);
  seen.style.setProperty("--ratio", seen.naturalWidth / seen.naturalHeight);
  seen.style.setProperty("--most", `${MOST_ZOOM * seen.naturalWidth}px`);
  byId("stack").hidden = false;
}

function showVerdict(model, photo) {
  const { result } = photo, kind = stateOf(photo), verdict = verdictOf(model, kind);
  let word = photo.state === "waiting" ? "Waiting …" : "Can't be used", sentence = photo.error;
  if (result) {
    word = verdict.word ? capital(verdict.word) : `${result.label}, ${percent(result.confidence)}`;
    const answer = answerOf(result);
    if (verdict.word && answer) word += `: ${answer}`;
    const p = result.p_value === null ? "" : ` (p = ${short(result.p_value)})`;
    const then = !verdict.word ? "" : answer ? ` The most probable class is ${result.label} (posterior ${percent(result.confidence)}).` : ` Don't trust the class ${result.label}.`;
    sentence = `${result.plain.replace(/\.$/, "")}${p}.${then}`;
  }
  const section = coloured(byId("verdict"), verdict);
  if (verdict.word) section.dataset.kind = verdict.kind;
  else delete section.dataset.kind;
  byId("verdict-badge").replaceChildren(badge(verdict));
  byId("verdict-word").textContent = word;
  byId("verdict-sentence").textContent = unbroken(sentence);
  if (done(photo)) announce(`${photo.name}. ${word}. ${sentence}`);
}

function showClasses({ posterior, classes }) {
  byId("classes").replaceChildren(...ranked(posterior).map(([label, share]) => {
    const out = classes !== null && !classes.includes(label);
    const fill = html("i");
    fill.style.width = `${100 * share}%`;
    const name = html("b", {}, label);
    if (out && classes.length) name.append(html("span", { className: "tag", textContent: "  ruled out" }));
    return html("li", { className: out ? "out" : "" }, html("div", { className: "name" }, name, html("span", { textContent: percent(share) })),
      html("div", { className: "track" }, fill));
  }));
  byId("classes-how").textContent = "Posterior probabilities, given that the photo shows one of the model's classes." +
    (classes && !classes.length ? " They mean little for such a photo." : "");
}

function showTypicality(model, result) {
  const { held_out: heldOut } = model;
  fitted("histogram", (width) => histogram(heldOut, result.p_value, width, unknown(model)));
  const alike = result.class_p_value === null ? "" : `; among those also predicted as ${result.label}, ${percent(result.class_p_value)}`;
  byId("histogram-how").textContent = unbroken(`${percent(result.p_value)} of the held-out images are as unusual as this one or more (blue bars)${alike}. ` +
    `Images with ${percent(heldOut.novelty)} or less count as ${unknown(model)}.`);
}
