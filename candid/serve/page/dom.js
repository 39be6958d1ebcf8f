// Elements and numbers as text.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function show(id, text) {
  byId(id).textContent = text;
  byId(id).hidden = text === "";
}

// For screen readers, which follow a place that was there before its words were.
export function announce(text) {
  if (byId("announcer").textContent !== text) byId("announcer").textContent = text;
}

export const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

export function html(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function percent(share) {
  const value = 100 * share;
  if (value === 0) return "0 %";
  if (value < 0.001) return "< 0.001 %";
  const text = value < 0.5 ? Number(value.toPrecision(1)).toString() : value < 99.5 ? value.toFixed(0) : value.toFixed(1);
  return `${text} %`;
}

export const decimals = (p) => (p < 0.0005 ? "< 0.001" : p.toFixed(3));

// Classes by falling posterior: in an object, names that are numbers come first, whatever their posterior is.
export const ranked = (posterior) => Object.entries(posterior).sort((one, other) => other[1] - one[1]);

export const short = (number) => Number(number.toPrecision(2)).toString();

export const signed = (number) => (number < 0 ? "−" : "+") + Math.abs(number).toFixed(Math.abs(number) < 10 ? 1 : 0);

export const listed = (words, last) => words.slice(0, -1).join(", ") + (words.length > 1 ? ` ${last} ` : "") + words.slice(-1);

// Numbers stay with their signs and units when lines break.
export const unbroken = (sentence) => sentence.replace(/p = /g, "p\u00a0=\u00a0").replace(/ (%|nats|σ)/g, "\u00a0$1");

// A shape for the tone of each verdict, so that colour is never the only sign.
export function badge(verdict) {
  const line = { fill: "none", stroke: "currentColor", "stroke-width": 2.2, "stroke-linecap": "round", "stroke-linejoin": "round" };
  const shapes = {
    good: [svg("circle", { cx: 12, cy: 12, r: 10, ...line }), svg("path", { d: "M7.5 12.5l3 3 6-7", ...line })],
    fair: [svg("circle", { cx: 8.5, cy: 12, r: 6.5, ...line }), svg("circle", { cx: 15.5, cy: 12, r: 6.5, ...line })],
    poor: [svg("path", { d: "M12 2.5l10 18H2z", ...line }), svg("path", { d: "M12 9v5m0 3.2v.1", ...line })],
    none: [svg("circle", { cx: 12, cy: 12, r: 10, ...line }), svg("path", { d: "M12 11v6m0-10v.1", ...line })],
  };
  return svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, ...(shapes[verdict.tone] || shapes.none));
}

// The verdict of a result, as the server describes it: word, sentence, tone and colours.
export const verdictOf = (model, kind) => model.verdicts.find((each) => each.kind === kind) || { kind: "none", tone: "none" };

export function coloured(element, verdict) {
  element.style.color = verdict.colour ? `light-dark(${verdict.colour}, ${verdict.dark_colour})` : "";
  return element;
}

export const capital = (sentence) => sentence.charAt(0).toUpperCase() + sentence.slice(1);

// What a photo is, in words: a class, a short list of classes, or a kind of classes.
export function answerOf(result) {
  const names = result.classes || [];
  if (result.node) return `some ${result.node} (${result.node_leaves} classes)`;
  return result.class_count > names.length ? `no common kind: ${names.join(", ")} …` : listed(names, "or");
}

// The promises of verdicts: one line, and all numbers and conditions behind a fold. The server has the words.
export function showPromises(id, promises) {
  byId(id).hidden = !promises;
  if (!promises) return;
  const more = promises.sentences.map((sentence) => html("li", { textContent: unbroken(sentence) }));
  byId(id).replaceChildren(html("p", { textContent: unbroken(promises.plain) }),
    html("details", {}, html("summary", { textContent: "All numbers and conditions" }), html("ul", {}, ...more)));
}
