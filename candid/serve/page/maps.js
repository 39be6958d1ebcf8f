// Heatmaps as canvases over the image.

import { signed } from "./dom.js";

const AGAINST_FOR = ["#2166ac", "#67a9cf", "#d1e5f0", "#f7f7f7", "#fddbc7", "#ef8a62", "#b2182b"];
const INFORMATION = ["#440154", "#3b528b", "#21918c", "#5ec962", "#fde725"];
const FINE = 16; // pixels of the canvas a position

const numbers = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));

function colourOf(stops, share) {
  const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const i = Math.min(Math.floor(at), stops.length - 2);
  const from = numbers(stops[i]), to = numbers(stops[i + 1]);
  return from.map((value, k) => value + (at - i) * (to[k] - value));
}

export const coloursOf = (kind) => (kind === "saliency" ? INFORMATION : AGAINST_FOR);

// The ends of the scale: all classes share one, which is even around zero.
export function rangeOf(kind, maps) {
  if (kind === "saliency") {
    const values = maps.saliency_nats.flat();
    return [Math.min(...values), Math.max(...values)];
  }
  const largest = Math.max(...maps.classes.flatMap((each) => each.values_nats.flat().map(Math.abs)), 1e-9);
  return [-largest, largest];
}

// What speaks neither for nor against a class lets the image through.
const strengthOf = (stops, share) => (stops === INFORMATION ? 1 : Math.min(1, 2 * Math.abs(share - 0.5)) ** 0.6);

export function drawMap(canvas, values, stops, [low, high]) {
  const rows = values.length, columns = values[0].length;
  canvas.width = columns * FINE;
  canvas.height = rows * FINE;
  const context = canvas.getContext("2d"), picture = context.createImageData(canvas.width, canvas.height);
  const clamp = (i, n) => Math.min(Math.max(i, 0), n - 1);
  for (let y = 0; y < canvas.height; y++) {
    for (let x = 0; x < canvas.width; x++) {
      const v = (y + 0.5) / FINE - 0.5, u = (x + 0.5) / FINE - 0.5, i = Math.floor(v), j = Math.floor(u);
      const at = (k, l) => values[clamp(k, rows)][clamp(l, columns)];
      const upper = at(i, j) + (u - j) * (at(i, j + 1) - at(i, j));
      const lower = at(i + 1, j) + (u - j) * (at(i + 1, j + 1) - at(i + 1, j));
      const value = upper + (v - i) * (lower - upper);
      const share = (value - low) / (high - low || 1);
      picture.data.set([...colourOf(stops, share), 255 * strengthOf(stops, share)], 4 * (y * canvas.width + x));
    }
  }
  context.putImageData(picture, 0, 0);
}

export function drawRamp(canvas, stops) {
  const context = canvas.getContext("2d"), picture = context.createImageData(canvas.width, 1);
  for (let x = 0; x < canvas.width; x++) picture.data.set([...colourOf(stops, x / (canvas.width - 1)), 255], 4 * x);
  context.putImageData(picture, 0, 0);
}

// What a map shows, for those who don't see it.
export function inWords(kind, name, values) {
  const found = values.flatMap((row, i) => row.map((value, j) => ({ value, where: whereabouts(i, j, row.length, values.length) })));
  const most = found.reduce((a, b) => (b.value > a.value ? b : a)), least = found.reduce((a, b) => (b.value < a.value ? b : a));
  if (kind === "saliency") return `Most information lies ${most.where}, least ${least.where}.`;
  const sum = found.reduce((total, each) => total + each.value, 0);
  const against = least.value < -0.05 ? `Most against it: ${least.where} (${signed(least.value)} nats)` : "Hardly anything speaks against it";
  return `Most for ${name}: ${most.where} (${signed(most.value)} nats). ${against}. ` +
    `All positions together: ${signed(sum)} nats.`;
}

function whereabouts(row, column, columns, rows) {
  const part = (i, n, names) => (n < 2 ? "" : names[Math.min(2, Math.floor((3 * (i + 0.5)) / n))]);
  const vertical = part(row, rows, ["top", "", "bottom"]), horizontal = part(column, columns, ["left", "", "right"]);
  const words = [vertical, horizontal].filter(Boolean).join(" ");
  return words ? (vertical ? `at the ${words}` : `on the ${words}`) : "in the middle";
}
