// The histogram of held-out scores and the decision space, as SVG.

import { byId, html, percent, ranked, short, svg } from "./dom.js";

const text = (x, y, content, attributes = {}) => svg("text", { x, y, ...attributes }, content);

// Where on the axis of scores a p-value lies; 0 to 1, and 1 beyond the last bar.
function place(tail, p) {
  const { p_values: ps } = tail;
  if (p >= ps[0]) return 0;
  for (let i = 1; i < ps.length; i++) {
    if (p >= ps[i]) return (i - 1 + (ps[i - 1] - p) / (ps[i - 1] - ps[i] || 1)) / (ps.length - 1);
  }
  return 1;
}

export function histogram(heldOut, p, width, unknown) {
  const height = 230, left = 4, right = width - 4, top = 44, bottom = 186;
  const x = (share) => left + share * (right - left);
  const { p_values: ps } = heldOut.tail;
  const shares = ps.slice(1).map((value, i) => ps[i] - value);
  const highest = Math.max(...shares, 1e-9);
  const here = place(heldOut.tail, p), limit = place(heldOut.tail, heldOut.novelty);
  const plot = svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `Histogram of how unusual held-out images are. This image has a p-value of ${short(p)}.` });
  shares.forEach((share, i) => {
    const size = (bottom - top) * share / highest;
    const start = i / shares.length, end = (i + 1) / shares.length;
    const cut = Math.min(Math.max(here, start), end);
    const bar = (from, to, name) => to > from && plot.append(svg("rect", { class: name,
      x: x(from) + 0.5, width: Math.max(0.5, x(to) - x(from) - 1), y: bottom - size, height: size }));
    bar(start, cut, "bar");
    bar(cut, end, "bar tail");
  });
  plot.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  plot.append(svg("line", { class: "limit", x1: x(limit), x2: x(limit), y1: top - 8, y2: bottom }));
  const spot = x(here);
  plot.append(svg("line", { class: "here", x1: spot, x2: spot, y1: top - 8, y2: bottom }));
  plot.append(svg("path", { class: "here-mark", d: `M${spot - 7} ${top - 18}h14l-7 10z` }));
  const side = here > 0.5 ? "end" : "start";
  plot.append(text(spot + (here > 0.5 ? 7 : -7), top - 26, `this image: p = ${short(p)}`, { class: "strong", "text-anchor": side }));
  plot.append(text(x(limit) - 6, top + 8, `${unknown} from here`, { class: "tick halo", "text-anchor": "end" }));
  plot.append(text(left, bottom + 20, "usual", { class: "tick" }), text(right, bottom + 20, "unusual", { class: "tick", "text-anchor": "end" }));
  plot.append(text((left + right) / 2, bottom + 38, `score “${heldOut.score}” of ${heldOut.images.toLocaleString("en")} held-out images`,
    { class: "unit", "text-anchor": "middle" }));
  return plot;
}

const MARKS = {
  first: (x, y) => svg("circle", { class: "first", cx: x, cy: y, r: 5 }),
  second: (x, y) => svg("rect", { class: "second", x: x - 4.5, y: y - 4.5, width: 9, height: 9 }),
  others: (x, y) => svg("path", { class: "others", d: `M${x} ${y - 5}l5 5l-5 5l-5-5z` }),
  here: (x, y) => svg("path", { class: "here-mark halo", d: star(x, y, 10) }),
  odd: (x, y) => svg("path", { class: "here-mark odd", d: star(x, y, 10) }),
};

function star(x, y, size) {
  const points = Array.from({ length: 10 }, (_, i) => {
    const radius = i % 2 ? size * 0.42 : size, angle = (i * Math.PI) / 5 - Math.PI / 2;
    return `${x + radius * Math.cos(angle)} ${y + radius * Math.sin(angle)}`;
  });
  return `M${points.join("L")}z`;
}

// `odd` is the word for an image that no class fits; empty for others.
export function decisionSpace(space, width, odd) {
  const height = 344, left = 40, right = width - 8, top = 36, bottom = 294;
  const [one, two] = space.means_along;
  const edge = Math.max(Math.abs(space.along), Math.abs(two - one) / 2 + space.half_width) * 1.12;
  const highest = Math.max(space.away, ...space.means_away, space.half_height) * 1.12;
  const x = (along) => left + ((along + edge) / (2 * edge)) * (right - left);
  const y = (away) => bottom - (away / highest) * (bottom - top);
  const [[first], [second]] = ranked(space.posterior);
  const plot = svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `Decision space: the image lies ${short(space.along)} standard deviations from the middle between ` +
      `${first} (at ${short(one)}) and ${second} (at ${short(two)}), and ${short(space.away)} away from their line.${odd ? ` It is ${odd}.` : ""}` });
  const half = (centre, name) => {
    const rx = x(space.half_width) - x(0), ry = bottom - y(space.half_height);
    return svg("path", { class: `ring ${name}`, d: `M${x(centre) - rx} ${bottom}a${rx} ${ry} 0 0 1 ${2 * rx} 0` });
  };
  plot.append(half(one, "first"), half(two, "second"));
  plot.append(svg("line", { class: "boundary", x1: x(space.boundary), x2: x(space.boundary), y1: top, y2: bottom }));
  plot.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }), svg("line", { class: "axis", x1: left, x2: left, y1: top, y2: bottom }));
  for (const tick of ticks(-edge, edge)) plot.append(text(x(tick), bottom + 17, tick.toString().replace("-", "−"), { class: "tick", "text-anchor": "middle" }));
  for (const tick of ticks(0, highest)) plot.append(text(left - 7, y(tick) + 4, tick.toString(), { class: "tick", "text-anchor": "end" }));
  space.means_along.slice(2).forEach((along, i) => plot.append(MARKS.others(x(along), y(space.means_away[i + 2]))));
  plot.append(MARKS.first(x(one), bottom), MARKS.second(x(two), bottom), MARKS[odd ? "odd" : "here"](x(space.along), y(space.away)));
  plot.append(text((left + right) / 2, 16, `outside of this drawing: ${(space.outside / space.outside_expected).toFixed(2)} × the expected distance`,
    { class: odd ? "unit odd" : "unit", "text-anchor": "middle" }));
  plot.append(text((left + right) / 2, bottom + 40, "along the line through the two means (σ)", { class: "unit", "text-anchor": "middle" }));
  plot.append(text(12, (top + bottom) / 2, "distance from it (σ)", { class: "unit", "text-anchor": "middle", transform: `rotate(-90 12 ${(top + bottom) / 2})` }));
  return plot;
}

function ticks(low, high) {
  const raw = (high - low) / 5, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * power).find((s) => s >= raw);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(Number((i * step).toPrecision(6)));
  return found;
}

export function spaceLegend(space, odd) {
  const entry = (mark, words) => html("li", {}, svg("svg", { class: "plot", viewBox: "0 0 24 24", "aria-hidden": "true" }, MARKS[mark](12, 12)), words);
  const [first, second, ...others] = ranked(space.posterior);
  const entries = [odd ? entry("odd", `this image (${odd})`) : entry("here", "this image"), entry("first", `${first[0]} (${percent(first[1])})`), entry("second", `${second[0]} (${percent(second[1])})`)];
  if (others.length) entries.push(entry("others", others.map(([name]) => name).join(", ")));
  return entries;
}

const plots = new Map(); // how to draw what is shown, at any width

export function fitted(id, draw) {
  plots.set(id, draw);
  const width = Math.min(Math.max(byId(id).clientWidth, 260), 520);
  byId(id).replaceChildren(draw(width));
}

let resized = 0;
window.addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => plots.forEach((draw, id) => fitted(id, draw)), 100);
});
