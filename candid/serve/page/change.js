// What would make the photo something else: the counterfactual, step by step.

import { api, formOf } from "./client.js";
import { announce, byId, html, percent, short, show } from "./dom.js";

export async function change(photo, isShown, needsToken) {
  const button = byId("change-form").querySelector("button");
  if (button.getAttribute("aria-disabled") === "true") return;
  show("change-problem", "");
  byId("change-result").hidden = true;
  byId("change-waiting").hidden = false;
  announce(byId("change-waiting").textContent);
  button.setAttribute("aria-disabled", "true"); // a disabled one would lose the focus
  try {
    const body = formOf([photo.file], { towards: byId("towards").value, target: byId("target").value });
    const { result } = await api("/v1/counterfactual", { method: "POST", body });
    if (!isShown()) return;
    if (result.status !== "changed") throw new Error(result.error);
    await showChange(result);
  } catch (error) {
    if (!isShown()) return;
    if (error.needsToken) needsToken(error);
    else show("change-problem", error.message);
  } finally {
    byId("change-waiting").hidden = true;
    button.removeAttribute("aria-disabled");
  }
}

async function showChange(result) {
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
    (result.reached ? "" : "No 8-bit image on the path meets the target; this one is closest. ") +
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

