// Reads the state once a second and shows it. Names are others' input: textContent alone.

import { BlockMap, colours, drawCell } from "./block_map.js";
import { Sparkline } from "./sparkline.js";

const PERIOD_MS = 1000;
const TIMEOUT_MS = 8000;
const STATE_URL = "dashboard/state";
const $ = (id) => document.getElementById(id);

class NeedsKey extends Error {}

const seconds = (value) => value < 1 ? `${(value * 1000).toPrecision(value < 0.01 ? 2 : 3)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
const whole = (value) => Math.round(value).toLocaleString("en");
const percent = (value) => `${value.toFixed(value < 10 ? 1 : 0)} %`;
const age = (value) => value < 90 ? `${value.toFixed(value < 10 ? 1 : 0)} s` : value < 5400 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;

const lines = {
  rate: new Sparkline($("rate-line"), "Output tokens a second", whole),
  ttft: new Sparkline($("ttft-line"), "Median time to first token", seconds),
  itl: new Sparkline($("itl-line"), "Median time between tokens", seconds),
  usage: new Sparkline($("usage-line"), "Blocks in use", percent),
};
const maps = new Map();
let timer = 0;
let before = null;
let round = 0;

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

// Left alone where nothing has changed, so that it is not said again.
function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function status(kind, text) {
  $("status").dataset.kind = kind;
  put($("status"), text);
}

async function read(query = "") {
  const key = sessionStorage.getItem("key");
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(STATE_URL + query, { headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (answer.status === 401 || answer.status === 403) throw new NeedsKey();
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  return answer.json();
}

const readCell = (replica, cell) => read(`?replica=${encodeURIComponent(replica)}&cell=${cell}`);

function show(state) {
  put($("model"), state.model);
  showFigures(state);
  showReplicas(state.replicas);
  showRequests(state);
  showEvents(state.events);
}

function showFigures({ replicas, totals, num_requests, requests, term }) {
  const now = performance.now();
  let rate = null;
  if (before) rate = Math.max(0, totals.output_tokens - before.tokens) / ((now - before.at) / 1000);
  before = { at: now, tokens: totals.output_tokens };
  let blocks = 0, used = 0;
  for (const { num_blocks, counts } of replicas) {
    blocks += num_blocks;
    used += counts.held + counts.shared + counts.pinned;
  }
  const values = { rate, ttft: totals.ttft_p50_s, itl: totals.itl_p50_s, usage: blocks ? (100 * used) / blocks : null };
  for (const [name, value] of Object.entries(values)) {
    put($(name), value === null ? "–" : lines[name].format(value));
    lines[name].push(value);
  }
  const parts = [`${whole(num_requests)} running`, `${whole(totals.finished)} finished`, `${whole(totals.failed)} failed`];
  const recoveries = requests.reduce((sum, request) => sum + request.recoveries, 0);
  parts.push(`${whole(totals.output_tokens)} output tokens`);
  if (recoveries) parts.push(`${recoveries} recoveries among those running`);
  if (totals.ttft_p99_s !== null) parts.push(`first token p99 ${seconds(totals.ttft_p99_s)}`);
  if (totals.itl_p99_s !== null) parts.push(`between tokens p99 ${seconds(totals.itl_p99_s)}`);
  parts.push(`controller term ${term}`);
  put($("counts"), parts.join(" · "));
}

function showReplicas(replicas) {
  $("no-replicas").hidden = replicas.length > 0;
  const names = new Set(replicas.map((replica) => replica.replica));
  for (const [name, map] of maps) {
    if (!names.has(name)) {
      map.root.remove();
      maps.delete(name);
    }
  }
  for (const replica of replicas) {
    let map = maps.get(replica.replica);
    if (!map) {
      map = new BlockMap(replica.replica, readCell);
      maps.set(replica.replica, map);
      const after = [...maps.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
      const next = maps.get(after[after.indexOf(replica.replica) + 1]);
      $("replicas").insertBefore(map.root, next?.root.isConnected ? next.root : null);
    }
    map.update(replica);
  }
}

function showRequests({ requests, num_requests }) {
  $("no-requests").hidden = requests.length > 0;
  $("requests").hidden = requests.length === 0;
  put($("num-requests"), num_requests > requests.length ? `${requests.length} of ${num_requests}` : `${num_requests}`);
  const labels = [...document.querySelectorAll("#requests th")].map((head) => head.textContent);
  $("requests").tBodies[0].replaceChildren(...requests.map((request) => {
    const row = make("tr");
    const cells = Array.from(labels, (label) => {
      const cell = make("td");
      cell.dataset.label = label;
      return cell;
    });
    const [name, stage, replica, prompt, output, since, recoveries] = cells;
    name.append(make("span", request.name, request.is_own ? "" : "other"));
    if (request.tenant) name.append(make("small", request.tenant));
    stage.textContent = request.stage;
    replica.textContent = request.replica ?? "–";
    prompt.textContent = whole(request.prompt_tokens) + (request.is_own ? ` (${whole(request.cached_tokens)})` : "");
    output.append(make("span", whole(request.output_tokens) + (request.max_tokens ? ` / ${whole(request.max_tokens)}` : "")));
    if (request.max_tokens) {
      const bar = make("progress");
      bar.max = request.max_tokens;
      bar.value = request.output_tokens;
      bar.setAttribute("aria-label", `Output of ${request.name}`);
      output.append(bar);
    }
    since.textContent = age(request.age_s);
    recoveries.append(make("span", `${request.recoveries}`, request.recoveries ? "recovered" : ""));
    row.append(...cells);
    return row;
  }));
}

const BAD = /lost|down|refus|fail|preempt/, GOOD = /started|recover/;

function showEvents(events) {
  $("no-events").hidden = events.length > 0;
  const list = $("events");
  const first = events[events.length - 1]?.sequence;
  const mark = `${first} ${events.length} ${events.at(-1)?.text}`;
  if (list.dataset.mark === mark) {
    [...events].reverse().forEach((event, index) => put(list.children[index].firstChild, `${age(event.ago_s)} ago`));
    return;
  }
  list.dataset.mark = mark;
  list.replaceChildren(...[...events].reverse().map((event) => {
    const item = make("li", undefined, BAD.test(event.kind) ? "bad" : GOOD.test(event.kind) ? "good" : "");
    item.append(make("time", `${age(event.ago_s)} ago`), make("b", event.kind), make("span", event.text));
    return item;
  }));
}

async function refresh() {
  clearTimeout(timer);
  const number = ++round;
  try {
    const state = await read();
    if (number !== round) return;
    $("key-form").hidden = true;
    $("board").hidden = false;
    $("forget").hidden = !sessionStorage.getItem("key");
    document.body.classList.remove("stale");
    show(state);
    status(state.replicas.length ? "live" : "away", state.replicas.length ? "Live" : "No replica serves");
  } catch (error) {
    if (number !== round) return;
    if (error instanceof NeedsKey) {
      askForKey();
      return;
    }
    before = null;
    document.body.classList.add("stale");
    status("away", error.name === "TypeError" || error.name === "TimeoutError"
      ? "The server is away; trying again" : `Out of date: ${error.message}; trying again`);
  }
  if (!document.hidden) timer = setTimeout(refresh, PERIOD_MS);
}

function askForKey() {
  const hadKey = sessionStorage.getItem("key") !== null;
  sessionStorage.removeItem("key");
  $("board").hidden = true;
  $("forget").hidden = true;
  $("key-form").hidden = false;
  put($("key-error"), hadKey ? "This key is not accepted." : "");
  status("wait", "Waiting for a key");
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  // A header holds no other characters.
  if (!/^[\x21-\x7e]+$/.test(key)) {
    put($("key-error"), "A key has letters, digits and signs alone.");
    return;
  }
  sessionStorage.setItem("key", key);
  $("key").value = "";
  status("wait", "Connecting…");
  refresh();
});

$("forget").addEventListener("click", () => {
  clearTimeout(timer);
  round += 1;
  sessionStorage.removeItem("key");
  for (const map of maps.values()) map.root.remove();
  maps.clear();
  askForKey();
});

function redraw() {
  const palette = colours();
  for (const swatch of document.querySelectorAll("#legend canvas")) {
    const pen = swatch.getContext("2d");
    pen.clearRect(0, 0, 16, 16);
    pen.fillStyle = pen.strokeStyle = palette[swatch.dataset.state];
    drawCell(pen, swatch.dataset.state, 1, 1, 15);
  }
  for (const map of maps.values()) map.draw();
  for (const line of Object.values(lines)) line.draw();
}

const THEMES = ["system", "light", "dark"];
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
  localStorage.setItem("theme", theme);
  redraw();
}
$("theme").addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("resize", redraw);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && $("key-form").hidden) refresh();
});

const kept = localStorage.getItem("theme");
setTheme(THEMES.includes(kept) ? kept : "system");
refresh();
