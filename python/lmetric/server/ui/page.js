// The live page. It reads one stream of events and draws at most once per update.
import { Charts } from "./charts.js";
import { Details } from "./details.js";
import { Fleet } from "./fleet.js";
import { clock, count, element, rate, seconds, setText, share } from "./format.js";
import { Events, Requests } from "./lists.js";

const part = (id) => document.getElementById(id);
const charts = new Charts(part("charts"));
const fleet = new Fleet();
const requests = new Requests();
const events = new Events();
const KEY = "lmetric-token";
const SILENT_MILLISECONDS = 10000;
let token = sessionStorage.getItem(KEY) ?? "";
let latest = null;
let paused = false;
let waiting = false;
let updates = 0;
let shownProblems = "";

const NOW = [
  ["TTFT p50", "ttft_p50", seconds, ["p95", "ttft_p95"]],
  ["TPOT p50", "tpot_p50", seconds, ["p95", "tpot_p95"]],
  ["End to end p50", "e2e_p50", seconds, ["p95", "e2e_p95"]],
  ["Hit rate", "hit_rate", share],
  ["Requests/s", "requests_per_second", rate, ["errors", "errors_per_second"]],
  ["Prompt tokens/s", "prompt_tokens_per_second", rate],
  ["Output tokens/s", "output_tokens_per_second", rate],
  ["In flight", "in_flight", count],
];
const cells = NOW.map(([title]) => {
  const value = element("dd", {}, element("span"), element("small"));
  part("now").append(element("div", {}, element("dt", { text: title }), value));
  return value;
});

function headers(more = {}) {
  return token ? { ...more, authorization: `Bearer ${token}` } : more;
}

async function load(path) {
  const answer = await fetch(path, { headers: headers(), cache: "no-store" });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error?.message ?? `status ${answer.status}`);
  return body;
}

const details = new Details(load);

function status(kind, text) {
  part("status").className = kind;
  setText(part("status").lastChild, text);
}

function schedule() {
  if (waiting || paused || document.hidden) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    if (!paused) draw(); // the key may have come meanwhile
  });
}

function draw() {
  if (!latest) return;
  const began = performance.now();
  NOW.forEach(([, key, unit, second], i) => {
    setText(cells[i].firstChild, unit(latest.now[key]));
    if (second) setText(cells[i].lastChild, `${second[0]} ${unit(latest.now[second[1]])}`);
  });
  charts.draw();
  const admin = latest.engines !== undefined;
  part("fleet").hidden = !admin;
  if (admin) {
    fleet.drawHot(latest.hot_spots, latest.guard, latest.programs);
    fleet.draw();
  }
  fleet.drawCounts(latest.summary);
  drawProblems(latest.problems, latest.summary);
  requests.draw(latest.requests);
  events.draw(latest.events);
  // For tests and for whoever looks: the time of this update.
  updates += 1;
  document.documentElement.dataset.updates = updates;
  document.documentElement.dataset.updateMilliseconds = (performance.now() - began).toFixed(2);
}

// The top of the page: what is wrong, since when, why, and what to do.
function drawProblems(problems, summary) {
  part("problems").hidden = problems === undefined;
  if (!problems) return;
  const lines = problems.map(({ level, what, since, reason, fix }) => [level, what, since ? ` since ${clock(since)}` : "", reason, fix]);
  const all = summary.engines === 1 ? "The engine is" : `All ${summary.engines} engines are`;
  if (!lines.length) lines.push(["good", `${all} usable and exact; no request failed or was refused for load in the last 5 minutes (clients' own errors do not count).`, "", "", null]);
  const key = JSON.stringify(lines);
  if (key === shownProblems) return;
  shownProblems = key;
  part("problem-list").replaceChildren(...lines.map(([level, what, since, reason, fix]) =>
    element("li", { class: level }, element("strong", { text: what + since }), reason ? `: ${reason}` : "", fix ? element("small", { text: `Fix: ${fix}` }) : "")));
}

// The models with their policies, and the version.
function drawAbout({ router, models }) {
  const parts = models.map(({ model, policy, formula, guard }) =>
    element("span", {}, element("b", { text: model || "no model yet" }), ` · policy ${policy}`, formula ? element("code", { text: formula }) : "", ` · guard ${guard}`));
  part("about").hidden = false;
  part("about").replaceChildren(...parts, element("span", { class: "muted", text: `version ${router}` }));
}

const handlers = {
  hello({ access }) {
    part("login").hidden = true;
    part("main").hidden = false;
    status("live", access === "tenant" ? "live, your own requests" : "live");
    details.open();
  },
  history(data) { charts.history(data); },
  fleet(data) { fleet.describeFleet(data); drawAbout(data); },
  update(data) {
    latest = data;
    charts.add(data.points);
    if (data.engines) fleet.update(data.engines);
    schedule();
  },
};

// EventSource cannot send a credential, so this reads the stream itself. Returns at its end.
async function read() {
  const abort = new AbortController();
  let timer = setTimeout(() => abort.abort(), SILENT_MILLISECONDS);
  const answer = await fetch("debug/live", { headers: headers({ accept: "text/event-stream" }), cache: "no-store", signal: abort.signal });
  if (!answer.ok) {
    clearTimeout(timer);
    const message = (await answer.json().catch(() => ({}))).error?.message ?? `status ${answer.status}`;
    const error = new Error(message);
    error.refused = answer.status === 401 || answer.status === 403;
    throw error;
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      clearTimeout(timer);
      if (done) return;
      timer = setTimeout(() => abort.abort(), SILENT_MILLISECONDS);
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) take(block);
    }
  } finally {
    clearTimeout(timer);
  }
}

function take(block) {
  let name = "message", data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  if (name in handlers) handlers[name](JSON.parse(data));
}

async function run() {
  for (;;) {
    try {
      await read();
      status("lost", "the stream ended; connecting again");
    } catch (error) {
      if (error.refused) {
        part("main").hidden = true;
        part("login").hidden = false;
        setText(part("why"), error.message);
        status("lost", "not open");
        part("token").focus();
        return;
      }
      status("lost", error.message && error.name !== "TypeError" && error.name !== "AbortError" ? error.message : "no connection; trying again");
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

function pause(on) {
  paused = on;
  part("pause").setAttribute("aria-pressed", String(on));
  setText(part("pause"), on ? "Paused" : "Pause");
  schedule();
}

part("pause").addEventListener("click", () => pause(!paused));
part("window").addEventListener("change", (event) => { charts.seconds = Number(event.target.value); charts.draw(); });
part("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = part("token").value.trim();
  sessionStorage.setItem(KEY, token);
  part("token").value = "";
  location.reload(); // another viewer may look now
});
document.addEventListener("visibilitychange", schedule);
document.addEventListener("keydown", (event) => {
  if (event.key === "p" && !event.ctrlKey && !event.metaKey && !event.altKey && !event.target.closest("input, select, dialog")) pause(!paused);
});
run();
