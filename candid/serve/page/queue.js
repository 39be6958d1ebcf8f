// Sends photos to the server in chunks within its limits. A photo that can't be used stops no other one.

import { api, formOf } from "./client.js";
import { makeThumbnail, photos } from "./photos.js";

const PART = 1000; // bytes of a multipart head, at most, without the name
const TRIES = 30; // while the server has too much to do
let running = false;

const refuse = (photo, error) => { Object.assign(photo, { state: "unusable", error }); };

// The next photos that fit into one request; those that can never fit are refused here.
async function nextChunk({ files, megabytes }) {
  const chunk = [];
  let bytes = 0;
  for (const photo of photos) {
    if (photo.state !== "waiting") continue;
    const size = photo.file.size + PART + 3 * photo.name.length;
    if (photo.file.size > megabytes * 1e6 - PART) {
      refuse(photo, `This file can't be used: it is larger than ${megabytes} MB; send a smaller one.`);
      continue;
    }
    if (chunk.length && (bytes + size > megabytes * 1e6 || chunk.length >= files || photo.alone || photo.again !== chunk[0].again)) break;
    if (!await photo.file.slice(0, 1).arrayBuffer().catch(() => null)) {
      refuse(photo, "This file can't be used: the browser can't read it. It was moved or changed, or it is a folder.");
      continue;
    }
    chunk.push(photo);
    bytes += size;
    if (photo.alone) break;
  }
  return chunk;
}

function answered(chunk, { results, version, stored }) {
  chunk.forEach((photo, i) => {
    const result = results[i];
    if (result.status === "unusable") refuse(photo, result.error);
    else Object.assign(photo, { state: "judged", result, version, stored: photo.stored ?? stored?.[i] ?? null });
  });
}

// Judges all that wait; `changed` is called after each chunk. An error means that the server can't be asked now.
export async function run(limits, changed) {
  if (running) return;
  running = true;
  let tries = 0;
  try {
    for (;;) {
      const chunk = await nextChunk(limits);
      if (chunk.length) {
        try {
          answered(chunk, await api(`/v1/examine${chunk[0].again ? "?again=true" : ""}`, { method: "POST", body: formOf(chunk.map(({ file }) => file)) }));
          tries = 0;
        } catch (error) {
          if (error.needsToken || error.gone || !error.status) throw error;
          if ([429, 503].includes(error.status)) {
            if (++tries > TRIES) throw error;
            await new Promise((resolve) => { setTimeout(resolve, 1000); });
          } else if (chunk.length > 1) for (const photo of chunk) photo.alone = true; // whichever it is, the others go on
          else refuse(chunk[0], error.message);
        }
        for (const photo of chunk) if (photo.state !== "waiting") makeThumbnail(photo).then(() => changed(photo), () => {});
      }
      changed();
      if (!chunk.length) return;
    }
  } finally {
    running = false;
  }
}
