// The strip that says whether the images have changed.

import { api } from "./client.js";
import { byId, short } from "./dom.js";

export async function showDrift() {
  const found = await api("/v1/drift").catch(() => ({ watching: false }));
  const strip = byId("drift");
  strip.hidden = !found.watching || found.images === 0;
  strip.classList.toggle("alarm", Boolean(found.alarm));
  const unproven = found.proven === false ? " No bound is proven for this level." : "";
  strip.textContent = (found.alarm
    ? `The images have changed since about image ${found.since} of ${found.images}: ${found.directions.join("; ")}.`
    : `${found.images} ${found.images === 1 ? "image" : "images"} watched for drift: no alarm (evidence ${short(found.evidence || 0)}, it rings at ${short(1 / found.level)}).`) + unproven;
  return found;
}
