// The decision record of one request: the sentence, its way across engines, and the alternatives.
import { element, number, seconds } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const PARTS = ["because", "timeline", "alternatives", "facts", "record"];
const part = (name) => document.getElementById(name);

// A link can be cut or mistyped.
function decoded(text) {
  try { return decodeURIComponent(text); } catch { return text; }
}

export class Details {
  constructor(load) {
    this.load = load;
    this.dialog = document.getElementById("details");
    this.dialog.addEventListener("close", () => this.clear());
    this.dialog.addEventListener("click", (event) => { if (event.target === this.dialog) this.dialog.close(); });
    addEventListener("hashchange", () => this.open());
  }

  async open() {
    if (!location.hash.startsWith("#request=")) return;
    const id = decoded(location.hash.slice("#request=".length));
    for (const name of PARTS) part(name).replaceChildren();
    part("details-title").textContent = `Request ${id}`;
    part("because").textContent = "Loading the decision record.";
    if (!this.dialog.open) this.dialog.showModal();
    this.id = id;
    try {
      const record = await this.load(`debug/decisions/${encodeURIComponent(id)}`);
      if (this.id !== id) return;
      part("details-title").textContent = `Request ${record.request_id ?? id}`;
      // A tenant's record can be without engines (errors.show_engines).
      const because = record.because ?? "the router does not show its engines.";
      part("because").textContent = because[0].toUpperCase() + because.slice(1);
      part("timeline").replaceChildren(...(record.timeline ? timeline(record) : []));
      part("alternatives").replaceChildren(...(record.best ? alternatives(record) : []));
      part("facts").replaceChildren(...facts(record));
      part("record").textContent = JSON.stringify(record, null, 2);
    } catch (error) {
      if (this.id === id) part("because").textContent = error.message;
    }
  }

  // The last record of a closed dialog would stay in memory.
  clear() {
    this.id = null;
    for (const name of PARTS) part(name).replaceChildren();
    if (location.hash.startsWith("#request=")) history.replaceState(null, "", location.pathname + location.search);
  }
}

function svg(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function timeline(record) {
  const parts = record.timeline.map((part) => ({ engine: part.engine ?? "router", kind: part.kind, from: part.from_seconds, to: part.to_seconds }));
  if (!parts.length) return [];
  const lanes = [...new Set(parts.map((part) => part.engine))];
  const from = Math.min(...parts.map((part) => part.from)), to = Math.max(...parts.map((part) => part.to));
  const width = Math.min(Math.max(document.getElementById("timeline").clientWidth, 280), 900), left = width < 500 ? 70 : 110, line = 26, top = 6, height = top + lanes.length * line + 22;
  const x = (value) => left + ((value - from) / (to - from || 1)) * (width - left - 12);
  const text = parts.map((part) => `${part.engine}: ${part.kind} from ${seconds(part.from)} to ${seconds(part.to)}`).join("; ");
  const image = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": text });
  for (let i = 0; i <= 4; i += width < 500 ? 2 : 1) {
    const value = from + ((to - from) * i) / 4;
    image.append(svg("line", { class: "grid", x1: x(value), x2: x(value), y1: top, y2: height - 18 }));
    image.append(svg("text", { class: "axis", x: x(value), y: height - 4, "text-anchor": i === 4 ? "end" : i ? "middle" : "start" }, value < 0 ? `-${seconds(-value)}` : i === 0 ? "0" : seconds(value)));
  }
  lanes.forEach((lane, i) => image.append(svg("text", { x: 0, y: top + i * line + 16 }, lane.length > left / 7 ? `${lane.slice(0, left / 7 - 1)}…` : lane)));
  parts.forEach((part, i) => {
    const y = top + lanes.indexOf(part.engine) * line + 3;
    const box = svg("rect", { class: part.kind, x: x(part.from), y, width: Math.max(2, x(part.to) - x(part.from)), height: line - 8, rx: 2 });
    box.append(svg("title", {}, `${part.engine}: ${part.kind}, ${seconds(part.to - part.from)}`));
    image.append(box);
    const before = parts[i - 1];
    if (before && before.engine !== part.engine) {
      image.append(svg("line", { class: "link", x1: x(part.from), x2: x(part.from), y1: top + lanes.indexOf(before.engine) * line + line / 2, y2: y + line / 2 - 3 }));
    }
  });
  const names = { wait: "waits", fetch: "prefix fetch", prefill: "to the first token", decode: "decode", answer: "whole answer" };
  const legend = element("p", { class: "legend" }, ...[...new Set(parts.map((part) => part.kind))].map((kind) => element("span", {}, element("i", { class: kind }), names[kind])));
  return [image, legend];
}

function alternatives(record) {
  const best = record.best ?? [];
  if (!best.length) return [];
  const terms = Object.keys(best[0].terms);
  const most = (values) => Math.max(...values.map((value) => Math.abs(value ?? 0)), 1e-12);
  const tops = [most(best.map((each) => each.score)), ...terms.map((term) => most(best.map((each) => each.terms[term])))];
  const cell = (value, top) => {
    const bar = element("b");
    bar.style.transform = `scaleX(${Math.min(Math.abs(value ?? 0) / top, 1).toFixed(3)})`;
    return element("td", {}, element("span", { class: "value" }, bar, element("em", { text: number(value) })));
  };
  const chosen = record.tried?.[0] ?? record.instance;
  const head = element("tr", {}, element("th", { text: "engine" }), element("th", { text: `score (${record.prefer === "max" ? "highest" : "lowest"} wins)` }), ...terms.map((term) => element("th", { text: term })));
  const rows = best.map((each) => element("tr", { class: each.instance === chosen ? "chosen" : "" },
    element("td", { text: each.instance === chosen ? `${each.instance} ✓` : each.instance }), cell(each.score, tops[0]), ...terms.map((term, i) => cell(each.terms[term], tops[i + 1]))));
  const more = record.scored - best.length;
  const parts = [element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows))];
  if (more > 0) parts.push(element("p", { class: "muted", text: `${number(more)} more ${more === 1 ? "engine" : "engines"} scored worse.` }));
  return parts;
}

const FACTS = [
  ["outcome", "outcome", String], ["policy", "policy", String], ["prompt tokens", "prompt_tokens", number],
  ["predicted cached tokens", "predicted_cached_tokens", number], ["cached tokens", "cached_tokens", number],
  ["output tokens", "output_tokens", number], ["TTFT", "ttft_seconds", seconds], ["end to end", "e2e_seconds", seconds],
  ["age of the load report", "load_report_age_seconds", seconds], ["priority", "priority", number],
  ["not split", "split_reason", String], ["no prefix fetch", "fetch_reason", String], ["waited", "held_seconds", seconds],
];

function facts(record) {
  return FACTS.filter(([, key]) => record[key] !== undefined && record[key] !== null)
    .map(([title, key, unit]) => element("div", {}, element("dt", { text: title }), element("dd", { text: unit(record[key]) })));
}
