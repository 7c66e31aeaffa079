// The lists of requests and of moves.
import { clock, count, element, number, seconds, setText, share } from "./format.js";

export class Requests {
  constructor() {
    this.body = document.querySelector("#list tbody");
    this.rows = new Map();
  }

  // Keeps the row elements of known requests, so that the focus stays where it is.
  draw(requests) {
    const known = new Set();
    requests.forEach((request, place) => {
      const key = request.id ?? `${request.request_id} ${request.at}`;
      known.add(key);
      let row = this.rows.get(key);
      if (!row) this.rows.set(key, (row = this.row(request)));
      this.fill(row, request);
      if (this.body.children[place] !== row) this.body.insertBefore(row, this.body.children[place] ?? null);
    });
    for (const [key, row] of this.rows) {
      if (!known.has(key)) { row.remove(); this.rows.delete(key); }
    }
  }

  row(request) {
    const row = element("tr");
    const name = element("td", { class: "id", title: request.request_id });
    if (request.id) name.append(element("a", { href: `#request=${encodeURIComponent(request.id)}`, text: request.request_id }));
    else name.textContent = request.request_id;
    row.append(element("td", { text: clock(request.at) }), name);
    for (const kind of ["", "n", "n", "n", "n", "n", ""]) row.append(element("td", { class: kind }));
    return row;
  }

  fill(row, request) {
    const runs = request.status === null;
    const cached = request.prompt_tokens && request.cached_tokens !== null && request.cached_tokens !== undefined ? `${request.predicted ? "~" : ""}${share(request.cached_tokens / request.prompt_tokens)}` : "–";
    const cells = [
      request.instance ?? "–", count(request.prompt_tokens), cached, runs ? "–" : count(request.output_tokens),
      seconds(request.ttft_seconds), seconds(request.tpot_seconds), runs ? `running ${seconds(request.seconds)}` : String(request.status),
    ];
    cells.forEach((text, i) => setText(row.children[i + 2], text));
    row.lastChild.className = runs ? "runs" : request.status >= 400 ? "bad" : "";
  }
}

function detail([name, value]) {
  if (name === "class") return `prefix ${String(value).slice(0, 8)}`;
  if (name === "share") return `${share(value)} of the requests`;
  return `${name.replaceAll("_", " ")} ${typeof value === "number" ? number(value) : value}`;
}

const WORDS = {
  fetch: (e) => `${e.target} fetches a prefix from ${e.source ?? "?"}: ${e.outcome}${e.tokens ? `, ${count(e.tokens)} tokens in ${seconds(e.seconds)}` : ""}`,
  handoff: (e) => `${e.source} hands off to ${e.target}`,
  migration: (e) => `${e.source} → ${e.target}${e.tokens ? `, ${count(e.tokens)} tokens` : ""}`,
  failover: (e) => `stream of ${e.source}: ${e.outcome}${e.outcome === "continued" ? ` on ${e.target}` : ""}`,
  retry: (e) => `${e.source} failed (${e.outcome}), next ${e.target}`,
  guard: (e) => [e.outcome, ...Object.entries(e.details ?? {}).map(detail)].join(", "),
};

export function drawEvents(events) {
  const list = document.getElementById("events");
  const newest = events.length ? `${events[0].at} ${events.length}` : "none";
  if (list.dataset.newest === newest) return;
  list.dataset.newest = newest;
  if (!events.length) {
    list.replaceChildren(element("li", { class: "muted", text: "No fetch, handoff, migration or guard event yet." }));
    return;
  }
  list.replaceChildren(...events.map((event) => {
    const failed = event.kind === "retry" || (event.kind === "failover" && event.outcome !== "continued");
    const item = element("li", { class: failed ? "bad" : "" }, element("time", { text: clock(event.at) }), element("span", { class: "kind", text: event.kind }), WORDS[event.kind](event));
    if (event.id) item.append(" ", element("a", { href: `#request=${encodeURIComponent(event.id)}`, text: "why" }));
    return item;
  }));
}
