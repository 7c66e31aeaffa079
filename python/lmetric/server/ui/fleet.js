// The engines: a heat map of tiles, and a table that only has the visible rows in the document.
import { count, element, rate, seconds, setText, share } from "./format.js";

const ROW = 28;
const byName = new Intl.Collator("en", { numeric: true });
const MOST_TILES_HEIGHT = 240;
const age = (value) => (value === null || value === undefined ? "–" : value < 1 ? "<1 s" : seconds(value));
const COLUMNS = [
  ["name", "engine"],
  ["state", "state"],
  ["role", "role", "wide"],
  ["mode", "mode", "wide"],
  ["model", "model", "wide"],
  ["batch", "batch", "n", count],
  ["queue", "queue", "n", count],
  ["queued_tokens", "queued tokens", "n wide", count],
  ["cache", "cache", "n", share],
  ["hit_rate", "hits", "n wide", share],
  ["age_seconds", "age", "n wide", age],
];
const UNITS = { batch: count, queue: count, cache: share, hit_rate: share, age_seconds: age };
const TROUBLE = new Set(["down", "ejected", "removed"]);

export class Fleet {
  constructor() {
    this.engines = [];
    this.natural = [];
    this.shown = [];
    this.measure = "batch";
    this.text = "";
    this.sorted = { key: "", down: true };
    this.selected = null;
    this.most = {};
    this.pool = [];
    this.canvas = document.getElementById("tiles");
    this.table = document.getElementById("table");
    this.rows = document.getElementById("rows");
    this.heads();
    this.listen();
  }

  heads() {
    const heads = COLUMNS.filter(([key]) => key !== "model").map(([key, title, kind = ""]) => {
      const button = element("button", { type: "button", text: title });
      button.addEventListener("click", () => {
        this.sorted = { key, down: this.sorted.key === key ? !this.sorted.down : typeof this.engines[0]?.[key] !== "string" };
        this.draw();
      });
      return element("span", { role: "columnheader", class: kind, "data-key": key }, button);
    });
    document.getElementById("heads").append(...heads);
  }

  listen() {
    document.getElementById("measure").addEventListener("change", (event) => { this.measure = event.target.value; this.draw(); });
    document.getElementById("filter").addEventListener("input", (event) => { this.text = event.target.value.trim().toLowerCase(); this.draw(); });
    this.table.addEventListener("scroll", () => this.drawRows(), { passive: true });
    this.table.addEventListener("keydown", (event) => this.key(event, 1, Math.max(1, Math.floor(this.table.clientHeight / ROW) - 2)));
    this.canvas.addEventListener("keydown", (event) => this.key(event, this.across, this.across));
    this.canvas.addEventListener("pointermove", (event) => this.describe(this.at(event)));
    this.canvas.addEventListener("pointerleave", () => this.describe(this.selected));
    this.canvas.addEventListener("click", (event) => this.select(this.at(event)));
    this.rows.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) this.select(this.shown[row.place] ?? null, false);
    });
    new ResizeObserver(() => this.draw()).observe(document.getElementById("map"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  key(event, step, page) {
    const last = this.shown.length - 1;
    const place = this.selected ? this.shown.indexOf(this.selected) : -1;
    const moves = { ArrowDown: place + step, ArrowUp: place - step, ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: last, PageDown: place + page, PageUp: place - page };
    if (!(event.key in moves) || event.target.closest("button")) return;
    if (event.currentTarget === this.table && (event.key === "ArrowLeft" || event.key === "ArrowRight")) return;
    event.preventDefault();
    this.select(this.shown[Math.min(Math.max(moves[event.key], 0), last)] ?? null);
  }

  // `models`, and the columns of the engines that change rarely.
  describeFleet({ engines }) {
    this.engines = engines.name.map((name, i) => {
      const known = this.engines[i]?.name === name && this.engines[i]?.model === engines.model[i] ? this.engines[i] : { name };
      for (const key of Object.keys(engines)) known[key] = engines[key][i];
      return known;
    });
    this.natural = this.engines.slice().sort((a, b) => byName.compare(a.name, b.name));
    if (this.selected && !this.engines.includes(this.selected)) this.selected = null;
  }

  update(columns) {
    for (const key of Object.keys(columns)) {
      const column = columns[key];
      for (let i = 0; i < this.engines.length && i < column.length; i++) this.engines[i][key] = column[i];
    }
  }

  draw() {
    const { key, down } = this.sorted;
    const text = this.text;
    this.shown = text ? this.natural.filter((each) => `${each.name} ${each.role} ${each.state} ${each.mode} ${each.model}`.toLowerCase().includes(text)) : this.natural.slice();
    if (key) {
      const sign = down ? -1 : 1;
      this.shown.sort((a, b) => {
        const [x, y] = [a[key] ?? null, b[key] ?? null];
        if (x === null || y === null) return (x === null) - (y === null);
        return x < y ? -sign : x > y ? sign : 0;
      });
    }
    // Small loads stay pale.
    for (const [name, least] of Object.entries({ batch: 8, queue: 8, queued_tokens: 2048, age_seconds: 5 })) {
      let most = least;
      for (const each of this.engines) if (each[name] > most) most = each[name];
      this.most[name] = most;
    }
    this.most.cache = this.most.hit_rate = 1;
    this.drawTiles();
    this.drawRows();
    this.describe(this.hovered ?? this.selected);
  }

  drawTiles() {
    const width = document.getElementById("map").clientWidth;
    const total = this.shown.length;
    if (!width || !total) { this.canvas.height = 0; this.canvas.style.height = "0"; return; }
    const size = Math.max(9, Math.min(54, Math.floor(Math.sqrt((width * MOST_TILES_HEIGHT) / total)), Math.floor(width / Math.min(total, 5))));
    this.size = size;
    this.across = Math.max(1, Math.floor(width / size));
    const height = Math.ceil(total / this.across) * size;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const scale = shades(color("--low"), color("--high"));
    const [bad, grey, line, accent, textColor] = ["--bad", "--grey", "--line", "--b", "--text"].map(color);
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const gap = size > 14 ? 2 : 1;
    const most = this.most[this.measure] || 1;
    for (let i = 0; i < total; i++) {
      const engine = this.shown[i];
      const x = (i % this.across) * size, y = Math.floor(i / this.across) * size, side = size - gap;
      const value = engine[this.measure];
      if (engine.state === "usable" || engine.state === "full") {
        pen.fillStyle = value === null || value === undefined ? line : scale[Math.round(Math.min(value / most, 1) * 63)];
        pen.fillRect(x, y, side, side);
      } else {
        pen.strokeStyle = TROUBLE.has(engine.state) ? bad : grey;
        pen.lineWidth = 1.5;
        pen.strokeRect(x + 1, y + 1, side - 2, side - 2);
        pen.beginPath();
        pen.moveTo(x + 2, y + side - 2);
        pen.lineTo(x + side - 2, y + 2);
        if (TROUBLE.has(engine.state)) { pen.moveTo(x + 2, y + 2); pen.lineTo(x + side - 2, y + side - 2); }
        pen.stroke();
      }
      if (size >= 40) {
        const bright = value !== null && value !== undefined && value / most > 0.5 && engine.state === "usable";
        pen.fillStyle = bright ? color("--card") : textColor;
        pen.font = "11px system-ui, sans-serif";
        pen.fillText(engine.name, x + 4, y + 15, side - 6);
        pen.fillText((UNITS[this.measure] || count)(value), x + 4, y + side - 6, side - 6);
      }
      if (engine === this.selected) {
        pen.strokeStyle = accent;
        pen.lineWidth = 2.5;
        pen.strokeRect(x, y, side, side);
      }
    }
    const unit = UNITS[this.measure] || count;
    document.getElementById("scale").replaceChildren("0", element("i"), `${unit(most)} · crossed: not usable`);
    this.canvas.setAttribute("aria-valuemax", total);
    this.canvas.setAttribute("aria-valuenow", this.shown.indexOf(this.selected) + 1);
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.size), line = Math.floor((event.clientY - box.top) / this.size);
    this.hovered = column < this.across ? this.shown[line * this.across + column] ?? null : null;
    return this.hovered;
  }

  describe(engine) {
    if (!engine) this.hovered = null;
    const text = engine
      ? `${engine.name}: ${engine.state}${engine.reason ? ` (${engine.reason})` : ""}, ${engine.role}, ${engine.mode ?? "mode unknown"}${engine.scheduler ? `, ${engine.scheduler}` : ""}; batch ${count(engine.batch)}, queue ${count(engine.queue)}, ` +
        `cache ${share(engine.cache)}, hits ${share(engine.hit_rate)}, report age ${age(engine.age_seconds)}`
      : "";
    setText(document.getElementById("tile-text"), text);
    this.canvas.setAttribute("aria-valuetext", text || "none chosen");
  }

  select(engine, scroll = true) {
    this.selected = engine;
    const place = this.shown.indexOf(engine);
    if (engine && scroll && place >= 0) {
      const top = place * ROW, view = this.table.clientHeight - 34;
      if (top < this.table.scrollTop) this.table.scrollTop = top;
      else if (top + ROW > this.table.scrollTop + view) this.table.scrollTop = top + ROW - view;
    }
    this.drawTiles();
    this.drawRows();
    this.describe(engine);
  }

  drawRows() {
    const total = this.shown.length;
    this.table.style.setProperty("--height", `${Math.min(total, 10) * ROW + 34}px`);
    this.rows.style.height = `${total * ROW}px`;
    this.table.setAttribute("aria-rowcount", total + 1);
    for (const head of document.querySelectorAll("#heads > span")) {
      const own = head.dataset.key === this.sorted.key;
      head.setAttribute("aria-sort", own ? (this.sorted.down ? "descending" : "ascending") : "none");
      const title = COLUMNS.find(([key]) => key === head.dataset.key)[1];
      setText(head.firstChild, own ? `${title} ${this.sorted.down ? "▾" : "▴"}` : title);
    }
    const first = Math.max(0, Math.floor(this.table.scrollTop / ROW) - 2);
    const fits = Math.min(total - first, Math.ceil(this.table.clientHeight / ROW) + 4);
    while (this.pool.length < fits) this.pool.push(this.row());
    this.pool.forEach((row, i) => {
      row.hidden = i >= fits;
      if (!row.hidden) this.fill(row, first + i);
    });
    if (this.selected) this.table.setAttribute("aria-activedescendant", "chosen-engine");
    else this.table.removeAttribute("aria-activedescendant");
  }

  row() {
    const row = element("div", { class: "row", role: "row" });
    for (const [key, , kind = "", unit] of COLUMNS) {
      if (key === "model") continue;
      const cell = element("span", { role: "gridcell", class: unit ? `cell ${kind}` : kind });
      if (unit) cell.append(element("b"), element("em"));
      row.append(cell);
    }
    this.rows.append(row);
    return row;
  }

  fill(row, place) {
    const engine = this.shown[place];
    row.place = place;
    row.style.transform = `translateY(${place * ROW}px)`;
    row.setAttribute("aria-rowindex", place + 2);
    row.classList.toggle("on", engine === this.selected);
    if (engine === this.selected) row.id = "chosen-engine"; else row.removeAttribute("id");
    let i = 0;
    for (const [key, , kind = "", unit] of COLUMNS) {
      if (key === "model") continue;
      const cell = row.children[i++], value = engine[key];
      if (unit) {
        setText(cell.lastChild, unit(value ?? null));
        const full = key === "age_seconds" ? 0 : value ? Math.min(value / this.most[key], 1) : 0;
        cell.firstChild.style.transform = `scaleX(${full.toFixed(3)})`;
      } else {
        setText(cell, value ?? "–");
        if (key === "state") { cell.className = `state ${value}`; cell.title = engine.reason ?? engine.mode_reason ?? ""; }
        if (key === "name") cell.title = [engine.model ? `${value} (${engine.model})` : value, engine.scheduler].filter(Boolean).join(", ");
      }
    }
  }

  drawCounts(summary) {
    const states = {};
    for (const each of this.engines) if (each.state !== "usable") states[each.state] = (states[each.state] || 0) + 1;
    const modes = Object.entries(summary.modes).map(([mode, n]) => `${n} ${mode}`);
    const others = Object.entries(states).map(([state, n]) => `${n} ${state}`);
    setText(document.getElementById("counts"), `${summary.usable} of ${summary.engines} usable${[...others, ...modes].length ? `: ${[...others, ...modes].join(", ")}` : ""}`);
  }

  // `hot`: the hottest engines. `busiest`: the engine most above the mean of its role, or null.
  drawHot({ hot, busiest }, guard, programs) {
    const shown = hot.map((each, i) => `${each.name} with ${i ? "" : "batch "}${count(each.batch)} (${rate(each.times)}x${i ? "" : " the mean of its role"})`);
    const most = busiest ? ` Busiest: ${busiest.name} with batch ${count(busiest.batch)} (${rate(busiest.times)}x the mean of its role).` : "";
    const lines = [hot.length ? element("p", { class: "flag", text: `Hot: ${shown.join(", ")}` }) : element("p", { class: "muted", text: `No engine is hot.${most}` })];
    for (const [model, state] of Object.entries(guard || {})) {
      const on = state.on ? `on, ${state.suspected} prefix${state.suspected === 1 ? "" : "es"} suspected, ${state.filtering} kept off their holders` : "off";
      lines.push(element("p", { class: state.filtering ? "flag" : "muted", text: `Hot-spot guard of ${model}: ${on}` }));
    }
    for (const [model, state] of Object.entries(programs || {})) {
      if (!state.held && !state.holds) continue;
      const held = `${count(state.held)} held, longest hold ${seconds(state.longest_hold_seconds)}`;
      lines.push(element("p", { class: state.held ? "flag" : "muted", text: `Agent programs of ${model}: ${held}` }));
    }
    const box = document.getElementById("hot");
    if (box.textContent !== lines.map((line) => line.textContent).join("")) box.replaceChildren(...lines);
  }
}

// 64 colors from low to high. Both are #rrggbb.
const made = new Map();
function shades(low, high) {
  const key = low + high;
  if (!made.has(key)) {
    const parts = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
    const [from, to] = [parts(low), parts(high)];
    made.set(key, Array.from({ length: 64 }, (_, i) => `rgb(${from.map((part, k) => Math.round(part + ((to[k] - part) * i) / 63)).join(",")})`));
  }
  return made.get(key);
}
