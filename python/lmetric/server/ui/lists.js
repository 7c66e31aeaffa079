// The lists of requests and of moves.
import { clock, count, element, number, seconds, setText, share } from "./format.js";

// Keeps the elements of known items, so that the focus stays where it is.
class List {
  constructor(body) {
    this.body = body;
    this.made = new Map();
  }

  // `key`, `make` and `fill` get an item; `fill` also gets its element.
  show(items, key, make, fill) {
    const known = new Set();
    items.forEach((item, place) => {
      const name = key(item);
      known.add(name);
      let own = this.made.get(name);
      if (!own) this.made.set(name, (own = make(item)));
      if (fill) fill(own, item);
      if (this.body.children[place] !== own) this.body.insertBefore(own, this.body.children[place] ?? null);
    });
    for (const [name, own] of this.made) {
      if (!known.has(name)) { own.remove(); this.made.delete(name); }
    }
  }
}

// The status of a finished request, with its end-to-end time if it has no TTFT.
function ended({ status, code, ttft_seconds: ttft, seconds: whole }) {
  if (status < 400 && ttft === null) return `${status} in ${seconds(whole)}`;
  return code ? `${status} ${code}` : String(status);
}

export class Requests {
  constructor() {
    this.list = new List(document.querySelector("#list tbody"));
    this.empty = document.getElementById("no-requests");
  }

  draw(requests) {
    this.empty.hidden = requests.length > 0;
    this.list.show(requests, (each) => each.id ?? `${each.request_id} ${each.at}`, (each) => this.row(each), (row, each) => this.fill(row, each));
  }

  row(request) {
    const row = element("tr");
    const { request_id: id, model, alias, fallback_from: first = null, fallback_reason: reason } = request;
    const chosen = first ?? model;
    const asked = alias ? `${alias}, an alias of ${chosen}` : chosen;
    const name = element("td", { class: "id", title: `${id}: ${asked}${first === null ? "" : `; fallback to ${model} (${reason})`}` });
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
      seconds(request.ttft_seconds), seconds(request.tpot_seconds), runs ? `running ${seconds(request.seconds)}` : ended(request),
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

// Tenants may not see the names of engines (`errors.show_engines: false`).
const from = ({ source }) => source ?? "an engine";
const to = ({ target }) => target ?? "another engine";

const WORDS = {
  fetch: (e) => `${e.target ?? "an engine"} fetches a prefix from ${e.source ?? "another engine"}: ${e.outcome}${e.tokens ? `, ${count(e.tokens)} tokens in ${seconds(e.seconds)}` : ""}`,
  handoff: (e) => `${from(e)} hands off to ${to(e)}`,
  migration: (e) => `${from(e)} → ${to(e)}${e.tokens ? `, ${count(e.tokens)} tokens` : ""}`,
  failover: (e) => `stream of ${from(e)}: ${e.outcome}${e.outcome === "continued" ? ` on ${to(e)}` : ""}`,
  retry: (e) => `${from(e)} failed (${e.outcome}), next ${to(e)}`,
  guard: (e) => [e.outcome, ...Object.entries(e.details ?? {}).map(detail)].join(", "),
};

export class Events {
  constructor() {
    this.list = new List(document.getElementById("events"));
    this.empty = document.getElementById("no-events");
  }

  draw(events) {
    this.empty.hidden = events.length > 0;
    this.list.show(events, (each) => each.key, (each) => this.item(each));
  }

  item(event) {
    const failed = event.kind === "retry" || (event.kind === "failover" && event.outcome !== "continued");
    const item = element("li", { class: failed ? "bad" : "" }, element("time", { text: clock(event.at) }), element("span", { class: "kind", text: event.kind }), WORDS[event.kind](event));
    if (event.id) item.append(" ", element("a", { href: `#request=${encodeURIComponent(event.id)}`, text: "why" }));
    return item;
  }
}
