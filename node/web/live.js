// Keeps the page up to date from /status. Everything shown was said by nodes that may lie, so it is only ever set as text.
"use strict";

const EVERY_MILLISECONDS = 1000;
const PATIENCE_MILLISECONDS = 5000;
const SHOWN_EVENTS = 60;
const MANY_REPLICAS = 40;
const CURVE_POINTS = 400;
const WORRYING = new Set(["strike", "quarantined", "ejected", "would_eject", "accusation", "verdict", "lost", "out_of_sync",
  "unaveraged", "suspect"]);
const CHECKS = new Set([...WORRYING, "cleared", "borne", "audit", "trusted", "probation"]);

const made = new Map();

function element(name, className, text) {
  const found = document.createElement(name);
  if (className) found.className = className;
  if (text !== undefined) found.textContent = String(text);
  return found;
}

function list(value) {
  return Array.isArray(value) ? value : [];
}

function short(value, most = 120) {
  const text = value === null || value === undefined ? "" : String(value);
  return text.length > most ? text.slice(0, most - 1) + "…" : text;
}

function number(value, digits = 0) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

function duration(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds)) return "–";
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.floor(seconds)} s`;
  if (minutes < 120) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h`;
}

// A part is made anew only if what it shows has changed: screen readers and selections are left in peace.
function show(id, shown, make) {
  const key = JSON.stringify(shown);
  if (made.get(id) === key) return;
  made.set(id, key);
  document.getElementById(id).replaceChildren(...make(shown));
}

function numbers(pairs) {
  return pairs.map(([name, value]) => {
    const box = element("div");
    box.append(element("dt", "", name), element("dd", "", short(value)));
    return box;
  });
}

function headline(status, answered) {
  document.getElementById("name").textContent = short(status.name) || "Sentinel Swarm";
  document.title = `${short(status.name) || "Sentinel Swarm"}: ${short(status.state)}`;
  show("state", [status.state, status.reason], ([state, reason]) => {
    const word = element("b", state === "training" || state === "finished" ? "ready" : "", short(state));
    return [word, document.createTextNode(` ${short(reason, 300)}`)];
  });
  const steps = status.steps > 0 ? `${number(status.step)} of ${number(status.steps)}` : number(status.step);
  const peers = new Set(list(status.replicas).filter((replica) => replica.presence !== "gone").map((replica) => replica.peer)).size;
  show("glance", [
    ["step", steps], ["loss", number(status.loss, 3)], ["tokens per second", number(status.tokens_per_second)],
    ["nodes", number(peers)], ["retried / lost", `${number(status.microbatches_retried)} / ${number(status.microbatches_lost)}`],
  ], numbers);
  const mine = status.contribution || {};
  const where = status.coordinator ? "coordinates" : typeof status.stage === "number" ? `stage ${status.stage}` : "none yet";
  const nodes = status.nodes || {};
  show("mine", status.observer ? [
    ["answering", number(nodes.answering)], ["silent", number(nodes.silent)], ["gone", number(nodes.gone)],
    ["not asked yet", number(nodes.unasked)], ["watching for", duration(status.uptime_seconds)],
  ] : [
    ["microbatches", number(mine.microbatches)], ["tokens", number(mine.tokens)], ["steps", number(mine.steps)],
    ["its place", where], ["running for", duration(status.uptime_seconds)],
  ], numbers);
  document.getElementById("stale").hidden = answered;
}

function looks(replica) {
  const standing = replica.standing || {};
  if (replica.presence === "gone") return "bad";
  if (replica.presence === "silent") return "fair";
  if (standing.state === "ejected" || standing.state === "quarantined" || replica.state === "ejected") return "bad";
  if (typeof standing.trust !== "number") return "";
  if (standing.state === "suspect" || standing.trust < 0.25) return "bad";
  return standing.trust < 0.6 ? "fair" : "good";
}

// An observer tells for how long a node has been silent or gone.
function said(replica) {
  const state = short(replica.state, 20);
  const absent = replica.presence === "silent" || replica.presence === "gone";
  return absent ? `${state} for ${duration(replica.for_seconds)}` : state;
}

function trusted(replica, me) {
  if (replica.peer === me) return "this node";
  const standing = replica.standing;
  if (!standing || typeof standing.trust !== "number") return "";
  return `${short(standing.state, 20)}, trust ${number(standing.trust, 2)}`;
}

// Its own word, which a coordinator and an observer pass on.
function gave(replica) {
  const count = (replica.contribution || replica.told || {}).microbatches;
  return typeof count === "number" && count > 0 ? `${number(count)} microbatches` : "";
}

function pipeline(status) {
  const replicas = list(status.replicas);
  const stages = Math.min(typeof status.stages === "number" ? status.stages : 0, 128);
  const shown = [];
  for (let stage = 0; stage < stages; stage += 1) {
    shown.push(replicas.filter((replica) => replica.stage === stage).map((replica) => ({
      peer: short(replica.peer).slice(-8), label: short(replica.label, 40), state: said(replica),
      look: looks(replica), trust: trusted(replica, status.peer), gave: gave(replica), me: replica.peer === status.peer,
    })));
  }
  const many = replicas.length > MANY_REPLICAS;
  document.getElementById("stages").className = many ? "stages many" : "stages";
  show("stages", shown, () => shown.map((here, stage) => {
    const column = element("li");
    column.append(element("h3", "", many ? `stage ${stage}: ${here.length}` : `stage ${stage}: ${here.length === 1 ? "1 replica" : `${here.length} replicas`}`));
    const rows = element("ul", "replicas");
    for (const replica of here) {
      const row = element("li", `replica ${replica.look} ${replica.me ? "me" : ""}`, replica.label || replica.peer);
      const words = [replica.state, replica.trust, replica.gave].filter(Boolean).join(" · ");
      row.append(element("span", "said", ` ${words}`));
      row.title = `${replica.peer} ${words}`;
      if (many) row.setAttribute("aria-label", `${replica.label || replica.peer}: ${words}`);
      rows.append(row);
    }
    column.append(rows);
    if (!here.length) column.append(element("p", "missing", "nobody: the swarm waits for a volunteer here"));
    return column;
  }));
}

function svg(name, attributes, text) {
  const found = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  if (text !== undefined) found.textContent = text;
  return found;
}

function curve(status) {
  const points = list(status.losses).filter((point) => Array.isArray(point) && point.every(Number.isFinite));
  const every = Math.max(1, Math.ceil(points.length / CURVE_POINTS));
  const kept = points.filter((_, place) => place % every === 0 || place === points.length - 1);
  const width = Math.max(240, document.getElementById("curve").clientWidth);
  show("curve", [width, kept], () => {
    if (kept.length < 2) return [element("p", "legend", "The curve begins after two steps.")];
    const [height, left, bottom, top] = [200, 42, 22, 8];
    const losses = kept.map((point) => point[1]);
    const steps = kept.map((point) => point[0]);
    const low = Math.min(...losses), high = Math.max(...losses), range = high - low || 1;
    const first = steps[0], last = steps[steps.length - 1], span = last - first || 1;
    const x = (step) => left + ((step - first) / span) * (width - left - 6);
    const y = (loss) => top + ((high - loss) / range) * (height - top - bottom);
    const label = `Loss from ${number(losses[0], 3)} at step ${first} to ${number(losses[losses.length - 1], 3)} at step ${last}`;
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "curve", role: "img", "aria-label": label });
    for (const value of [low, (low + high) / 2, high]) {
      drawing.append(svg("line", { x1: left, x2: width - 6, y1: y(value), y2: y(value) }));
      drawing.append(svg("text", { x: left - 5, y: y(value) + 4, "text-anchor": "end" }, number(value, 2)));
    }
    drawing.append(svg("text", { x: left, y: height - 4 }, `step ${first}`));
    drawing.append(svg("text", { x: width - 6, y: height - 4, "text-anchor": "end" }, `step ${last}`));
    drawing.append(svg("polyline", { points: kept.map((point) => `${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`).join(" ") }));
    return [drawing];
  });
}

function clock(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds)) return "";
  return new Date(seconds * 1000).toLocaleTimeString();
}

function events(status) {
  const told = list(status.events).filter((event) => event && CHECKS.has(event.kind)).slice(-SHOWN_EVENTS).reverse();
  show("events", told, () => {
    if (!told.length) return [element("p", "legend", "Nobody was flagged, audited or ejected so far, as far as is seen from here.")];
    const table = element("table", "events");
    const head = element("tr");
    for (const name of ["time", "step", "what", "whom", "why"]) head.append(element("th", "", name));
    const top = element("thead");
    top.append(head);
    const body = element("tbody");
    for (const event of told) {
      const row = element("tr");
      const whom = [short(event.peer).slice(-8), typeof event.stage === "number" ? `stage ${event.stage}` : ""];
      row.append(element("td", "", clock(event.time)), element("td", "", short(event.step)));
      row.append(element("td", WORRYING.has(event.kind) ? "bad" : "", short(event.kind).replaceAll("_", " ")));
      row.append(element("td", "", whom.filter(Boolean).join(", ")), element("td", "", short(event.text, 300)));
      body.append(row);
    }
    table.append(top, body);
    return [table];
  });
}

async function refresh() {
  let answered = true;
  try {
    const response = await fetch("/status", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MILLISECONDS) });
    if (!response.ok) throw new Error(`status ${response.status}`);
    const status = await response.json();
    document.getElementById("live").hidden = false;
    document.getElementById("still").hidden = true;
    headline(status, true);
    pipeline(status);
    curve(status);
    events(status);
  } catch {
    answered = false;
  }
  document.getElementById("stale").hidden = answered;
  setTimeout(refresh, EVERY_MILLISECONDS);
}

refresh();
