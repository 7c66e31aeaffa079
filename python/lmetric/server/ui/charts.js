// Charts of the last minutes (uPlot).
import { clock, element, rate, seconds, share } from "./format.js";

const KEPT = 900;
const HEIGHT = 130;
const MEAN_SECONDS = 10;
const LEAST_SECONDS = 60;
const DOT = 6;  // diameter
const CHARTS = [
  { title: "Time to first token", unit: seconds, lines: [["ttft_p50", "p50"], ["ttft_p95", "p95"]] },
  { title: "Time per output token", unit: seconds, lines: [["tpot_p50", "p50"], ["tpot_p95", "p95"]] },
  { title: "End-to-end time", unit: seconds, lines: [["e2e_p50", "p50"], ["e2e_p95", "p95"]] },
  { title: "Requests/s", unit: rate, lines: [["requests_per_second", "ended"], ["errors_per_second", "errors"]] },
  { title: "Prompt tokens/s", unit: rate, lines: [["prompt_tokens_per_second", "of ended requests"]] },
  { title: "Output tokens/s", unit: rate, lines: [["output_tokens_per_second", "of ended requests"]] },
  { title: "Hit rate", unit: share, top: 1, lines: [["hit_rate", "of prompt tokens"]] },
];

// Single seconds look like noise, so lines show means over 10 seconds of the clock.
function grouped(points) {
  const groups = [];
  let last = null;
  for (const point of points) {
    const number = Math.floor(point[0] / MEAN_SECONDS);
    if (number !== last) groups.push([]);
    groups[groups.length - 1].push(point);
    last = number;
  }
  return groups;
}

// The mean of a field's known values; `weight`: the place of their weights, or -1.
function mean(group, place, weight) {
  let sum = 0, total = 0;
  for (const point of group) {
    if (point[place] === null) continue;
    const own = weight < 0 ? 1 : point[weight];
    sum += own * point[place];
    total += own;
  }
  return total ? sum / total : null;
}

// The places of values between two gaps: a line through one of them has no length.
function lone(plot, series) {
  const values = plot.data[series];
  const known = (place) => values[place] !== null && values[place] !== undefined;
  return values.flatMap((_, place) => known(place) && !known(place - 1) && !known(place + 1) ? [place] : []);
}

export class Charts {
  constructor(box) {
    this.box = box;
    this.fields = [];
    this.points = [];
    this.seconds = 300;
    this.plots = [];
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.build());
    new ResizeObserver(() => {
      for (const { plot, holder } of this.plots) plot.setSize({ width: holder.clientWidth, height: HEIGHT });
    }).observe(box);
  }

  // The history replaces points of the same times, so nothing is counted twice after a reconnection.
  history({ fields, points }) {
    this.fields = fields;
    this.add(points);
    this.build();
  }

  // After a step back of the router's clock, later points are removed.
  add(points) {
    let start = points.length - 1;
    while (start > 0 && points[start - 1][0] <= points[start][0]) start -= 1;
    const fresh = points.slice(Math.max(start, 0));
    const end = () => (this.points.length ? this.points[this.points.length - 1][0] : 0);
    if (fresh.length && fresh[fresh.length - 1][0] < end()) this.points = this.points.filter((point) => point[0] < fresh[0][0]);
    const last = end();
    for (const point of fresh) if (point[0] > last + 0.01) this.points.push(point);
    if (this.points.length > KEPT) this.points.splice(0, this.points.length - KEPT);
  }

  build() {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    for (const { plot } of this.plots) plot.destroy();
    this.box.replaceChildren();
    this.plots = CHARTS.map((chart) => {
      const holder = element("div", { class: "plot" });
      const heads = chart.lines.map(([, name], i) => element("span", { class: "ab"[i] }, element("i"), name));
      this.box.append(element("div", { class: "chart" }, element("h3", { text: chart.title }, ...heads), holder));
      const axis = { stroke: color("--muted"), font: "11px system-ui", grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } };
      const plot = new uPlot({
        width: holder.clientWidth || 300,
        height: HEIGHT,
        legend: { show: false },
        cursor: { y: false, points: { show: false } },
        scales: { y: { range: (_, low, high) => [0, chart.top ?? (high > 0 ? high * 1.1 : 1)] } },
        axes: [
          { ...axis, size: 24, space: 70, values: (_, ticks) => ticks.map((tick) => clock(tick).slice(0, tick % 60 ? 8 : 5)) },
          { ...axis, size: 52, space: 26, values: (_, ticks) => ticks.map((tick) => chart.unit(tick)) },
        ],
        series: [{}, ...chart.lines.map(([, label], i) => {
          const stroke = color(i ? "--b" : "--a");
          return { label, stroke, width: 1.6, spanGaps: false, points: { show: false, filter: lone, size: DOT, fill: stroke } };
        })],
      }, [[], ...chart.lines.map(() => [])], holder);
      return { chart, plot, holder };
    });
    this.draw();
  }

  draw() {
    if (!this.points.length) return;
    const end = this.points[this.points.length - 1][0];
    const from = this.points.findIndex((point) => point[0] >= end - this.seconds);
    const groups = grouped(this.points.slice(from));
    if (groups.length > 1 && groups[groups.length - 1].length < MEAN_SECONDS / 2) groups.pop();
    // A new router has no empty minutes to show.
    const start = Math.max(end - this.seconds, Math.min(this.points[from][0], end - LEAST_SECONDS));
    const times = groups.map((group) => group[group.length - 1][0]);
    const weight = this.fields.indexOf("prompt_tokens_per_second");
    for (const { chart, plot } of this.plots) {
      const columns = chart.lines.map(([field]) => {
        const place = this.fields.indexOf(field);
        return groups.map((group) => mean(group, place, field === "hit_rate" ? weight : -1));
      });
      plot.batch(() => {
        plot.setData([times, ...columns], false);
        plot.setScale("x", { min: start, max: end });
      });
    }
  }
}
