// The photos of this visit: their files, what was said of them, and pictures of them that the browser can show.

import { ask, formOf } from "./client.js";
import { html } from "./dom.js";

const THUMBNAIL = 256; // most pixels on a side
const ENDINGS = /\.(bmp|gif|heic|heif|jpe?g|pgm|png|ppm|tiff?|webp)$/i;

export const photos = [];

export const done = (photo) => photo.state !== "waiting";
export const stateOf = (photo) => (photo.state === "judged" ? photo.result.verdict || "no verdict" : photo.state);

export function add(files) {
  const added = files.map((file, i) => ({ number: photos.length + i, file, name: file.path || file.name || "pasted photo",
    state: "waiting", again: false, result: null, version: 0, stored: null, correction: "", error: "", thumbnail: null, shown: undefined }));
  photos.push(...added);
  return added;
}

// What another model says of the photos that were judged: they wait again, and do not count again.
export function askAgain() {
  for (const photo of photos) if (photo.state === "judged") Object.assign(photo, { state: "waiting", again: true, explanation: null });
}

export function clear() {
  for (const photo of photos) if (photo.thumbnail) URL.revokeObjectURL(photo.thumbnail.src);
  photos.length = 0;
}

// All files that were dropped or pasted, those in folders, too; what is no photo there is named.
export async function filesOf(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  const plain = [...transfer.files]; // both lists are gone after the first wait
  if (!entries.some((entry) => entry.isDirectory)) return { files: plain, others: [] };
  const files = [], others = [];
  for (const entry of entries) await walk(entry, files, others);
  return { files, others };
}

async function walk(entry, files, others) {
  if (entry.isFile) {
    const file = await new Promise((resolve, reject) => { entry.file(resolve, reject); });
    file.path = entry.fullPath.replace(/^\//, "");
    (file.type.startsWith("image/") || ENDINGS.test(file.name) ? files : others).push(file);
    return;
  }
  const reader = entry.createReader();
  for (;;) { // a hundred at a time
    const some = await new Promise((resolve, reject) => { reader.readEntries(resolve, reject); });
    if (!some.length) return;
    for (const inner of some) await walk(inner, files, others);
  }
}

async function readable(blob) {
  const bitmap = await createImageBitmap(blob).catch(() => null);
  return bitmap && { blob, bitmap };
}

// A picture that this browser shows: the file itself, or what the server makes of HEIC and TIFF; null without one.
async function opened(photo) {
  const own = await readable(photo.file);
  if (own || photo.state !== "judged") return own;
  const answer = await ask("/v1/picture", { method: "POST", body: formOf([photo.file]) }).catch(() => null);
  return answer && readable(await answer.blob());
}

// The blob to show at full size; asked for once.
export async function pictureOf(photo) {
  if (photo.shown === undefined) await makeThumbnail(photo);
  return photo.shown;
}

let working = Promise.resolve();

// One after the other: a photo of 48 megapixels takes 200 MB while it is open.
export function makeThumbnail(photo) {
  const job = working.then(() => (photo.shown === undefined ? draw(photo) : null));
  working = job.catch(() => {});
  return job;
}

async function draw(photo) {
  const open = await opened(photo);
  if (!open && photo.state === "waiting") return; // once it is judged, the server may have a picture
  photo.shown = open?.blob ?? null;
  if (!open) return;
  const { bitmap } = open, scale = Math.min(1, THUMBNAIL / Math.max(bitmap.width, bitmap.height));
  const canvas = html("canvas", { width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)) });
  const context = canvas.getContext("2d");
  Object.assign(context, { imageSmoothingQuality: "high", fillStyle: "white" });
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const blob = await new Promise((resolve) => { canvas.toBlob(resolve, "image/jpeg", 0.85); });
  photo.thumbnail = { blob, src: URL.createObjectURL(blob) };
}
