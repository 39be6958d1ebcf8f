// "This is wrong: it is …": what people say that a stored photo shows.

import { api, formFields } from "./client.js";
import { announce, byId, count, html, show } from "./dom.js";

let current = null, after = () => {}, token = () => {};

export function beginCorrecting(model, changed, needsToken) {
  [after, token] = [changed, needsToken];
  byId("class-names").replaceChildren(...model.classes.map((name) => html("option", { value: name })));
}

// The form belongs to the photo that is shown; only stored photos can be corrected.
export function showCorrection(model, photo) {
  const other = photo !== current;
  current = photo;
  byId("correct").hidden = !model.stores_images || !photo.result || photo.stored === null;
  byId("corrected").hidden = photo.correction === "";
  byId("corrected-words").textContent = photo.correction ? `Noted: it is ${photo.correction}.` : "";
  if (other) {
    byId("is").value = "";
    show("correct-problem", "");
  }
}

// Sends what stored photos show, and returns what the server knows then; an empty name takes it back.
export const correct = (ids, name) => api("/v1/corrections", { method: "POST", body: formFields({ ids, name }) });

async function save(name) {
  const photo = current;
  show("correct-problem", "");
  try {
    const found = await correct([photo.stored], name);
    photo.correction = name.trim();
    byId("is").value = "";
    after(found, photo);
    const words = `${photo.correction ? `Noted: ${photo.name} is ${photo.correction}` : `${photo.name} has no correction`}. ${count(found.waiting, "correction")} ${found.waiting === 1 ? "waits" : "wait"} to be taught.`;
    announce(words);
  } catch (error) {
    if (error.needsToken) token(error, () => save(name));
    else show("correct-problem", error.message);
  }
}

byId("correct").addEventListener("submit", (event) => {
  event.preventDefault();
  if (byId("is").value.trim()) save(byId("is").value);
});
byId("take-back").addEventListener("click", () => save(""));
