// What pages do beyond HTML: follow the service's events, draw curves, send forms as JSON, say what went wrong.
"use strict";

const KINDS = ["queued", "claimed", "started", "progress", "batch", "metrics", "stall", "pausing", "paused", "resumed",
  "changed", "cancelling", "cancelled", "completed", "failed", "deleted", "gap"];
const RETRY_MS = 3000;
const POLL_MS = 1000;
const NEWS_MS = 700;
const COLOURS = ["--one", "--two", "--three", "--four"];

const toast = document.getElementById("toast");

function say(text) {
  toast.textContent = text;
  toast.hidden = !text;
}

// The session has ended: the login comes in place of the page, unless a form would be lost with it.

let filled = false;

document.addEventListener("input", (event) => {
  if (event.target.closest("[data-json]")) filled = true;
});

function sessionEnded() {
  if (!filled) {
    location.reload();
    return true;
  }
  if (!toast.hidden && toast.firstElementChild) return false; // it was said
  const link = document.createElement("a");
  link.href = "/login";
  link.target = "_blank";
  link.textContent = "Log in";
  toast.replaceChildren("Your session has ended. ", link, " in another tab, then send this again.");
  toast.hidden = false;
  return false;
}

const degraded = document.getElementById("degraded");

function sayDegraded(text) {
  degraded.querySelector("span").textContent = text;
  degraded.hidden = !text;
}

const live = document.getElementById("live");

function sayLive(text) {
  live.textContent = text;
  live.hidden = !text;
}

// Parts of the page are asked for again at most every `NEWS_MS`, and always once after the last event.
let planned = 0;
let latest = 0;

function news() {
  if (planned) return;
  planned = setTimeout(() => {
    planned = 0;
    latest = Date.now();
    htmx.trigger(document.body, "news");
  }, Math.max(0, latest + NEWS_MS - Date.now()));
}

// Events. One connection a page, and none while the page is hidden: a browser has six for a service.

function follow(address) {
  let source = null;
  let last = new URL(address, location.href).searchParams.get("after");

  function open() {
    const url = new URL(address, location.href);
    url.searchParams.set("after", last);
    source = new EventSource(url);
    for (const kind of KINDS) {
      source.addEventListener(kind, (event) => {
        last = event.lastEventId || last;
        if (kind === "metrics") addRow(JSON.parse(event.data));
        news();
      });
    }
    source.addEventListener("open", () => {
      sayLive("");
      ready();
    });
    source.addEventListener("degraded", (event) => sayDegraded(JSON.parse(event.data).error));
    source.addEventListener("recovered", () => {
      sayDegraded("");
      news();
    });
    source.addEventListener("error", () => {
      if (source && source.readyState === EventSource.CLOSED) refused(url);
      else sayDegraded("it does not answer; this page continues when it does");
    });
  }

  // What was missed while there was no stream: the service may have become degraded, or well again.
  async function ready() {
    const {status, answer} = await ask("/api/v1/training/ready", "GET").catch(() => ({}));
    if (status === 200 || status === 503) sayDegraded(answer.error || "");
  }

  // The browser does not say why a stream was refused: the address is asked once more.
  async function refused(url) {
    const unread = new AbortController();
    try {
      const response = await fetch(url, {headers: {Accept: "application/json"}, signal: unread.signal});
      if (response.status === 401) {
        if (sessionEnded()) return;
      } else if (!response.ok) {
        sayLive(`This page gets no events: ${(await response.json()).error}. It asks again every ${RETRY_MS / 1000} s.`);
        sayDegraded("");
        news();
      }
    } catch {
      sayDegraded("it does not answer; this page continues when it does");
    }
    unread.abort();
    setTimeout(reopen, RETRY_MS);
  }

  function reopen() {
    if (!document.hidden) {
      if (source) source.close();
      open();
    }
  }

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      if (source) source.close();
      source = null;
    } else if (!source) {
      open();
      news();
    }
  });
  open();
}

// Curves. A page of one job has one run; where jobs are compared, each is a run and a line in every chart.

const drawn = document.getElementById("drawn");
const {charts: known, runs} = drawn ? JSON.parse(drawn.textContent) : {charts: [], runs: []};
const holder = document.getElementById("charts");
const scales = document.getElementById("scales");
const WHOLE = [...Array(9).keys()].flatMap((power) => [1, 2, 5].map((step) => step * 10 ** power));
const AXES = {
  epoch: {of: (_run, row) => row.epoch, text: String, ticks: WHOLE},
  step: {of: (_run, row) => row.step, text: String, ticks: WHOLE},
  time: {of: (run, row) => row.at - run.began, text: duration, ticks: [...WHOLE.slice(0, 4), 30, 60, 120, 300, 600, 1800,
    ...WHOLE.map((hours) => 3600 * hours)]},
};
let axis = "epoch";
let logarithmic = false;
let charts = [];
let plots = [];

function duration(seconds) {
  const [unit, size] = seconds < 120 ? ["s", 1] : seconds < 7200 ? ["min", 60] : ["h", 3600];
  return `${Number((seconds / size).toFixed(1))} ${unit}`;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function shown(value) {
  if (value === null || value === undefined) return "–";
  const rounded = Number(value.toPrecision(4));
  return rounded !== 0 && Math.abs(rounded) < 1e-3 ? rounded.toExponential() : String(rounded);
}

// The charts and lines that the rows have numbers for.
function charted() {
  const numbers = (row) => Object.keys(row).filter((name) => typeof row[name] === "number");
  const there = runs.map((run) => new Set(run.rows.flatMap(numbers)));
  return known.map((chart) => {
    const all = chart.series.flatMap((one) => runs.map((run, i) => ({...one, run, number: i, key: `${one.name} ${i}`})));
    const lines = all.filter((line) => there[line.number].has(line.name)).map((line, i) => ({
      ...line, hue: runs.length > 1 ? line.number : i, label: runs.length > 1 ? line.run.name : line.label,
    }));
    const log = logarithmic && chart.unit !== "%" && lines.some((line) => line.run.rows.some((row) => row[line.name] > 0));
    return {...chart, lines, log, key: chart.title + chart.unit};
  }).filter((chart) => chart.lines.length > 0);
}

function valueIn(chart, line, row) {
  const value = row[line.name];
  return typeof value === "number" && (value > 0 || !chart.log) ? value * line.factor : null;
}

// Values of x, then those of each line there. Lines of several runs have their values at different x.
function points(chart) {
  const lines = chart.lines.map((line) => new Map(line.run.rows.map((row) => [AXES[axis].of(line.run, row), valueIn(chart, line, row)])));
  const x = [...new Set(lines.flatMap((line) => [...line.keys()]))].filter(Number.isFinite).sort((one, other) => one - other);
  return [x, ...lines.map((line) => x.map((at) => line.get(at) ?? null))];
}

// What the legend says of a line: its value under the cursor, and without one its last.
function legendValue(plot, line, at) {
  const values = plot.data[line];
  const last = values.findLastIndex((value) => value !== null);
  if (at === null) return shown(values[last]);
  return at > last ? "–" : shown(values.slice(0, at + 1).findLast((value) => value !== null));
}

function summary(chart) {
  const parts = chart.lines.map((line) => {
    const last = line.run.rows.map((row) => valueIn(chart, line, row)).findLast((value) => value !== null);
    return `${line.label} ${last === undefined ? "unknown" : `${shown(last)} ${chart.unit}`}`.trim();
  });
  return `${chart.title} by ${axis}; last: ${parts.join(", ")}`;
}

// The part of the x axis that somebody has chosen with the mouse; null: all of it.
function zoomOf(plot) {
  const [x, {min, max}] = [plot.data[0], plot.scales.x];
  return x.length && (min > x[0] || max < x[x.length - 1]) ? {min, max} : null;
}

// A ring on each line at the best epoch of its run.
function ring(plot, chart) {
  const {ctx, bbox} = plot;
  chart.lines.forEach((line, i) => {
    const row = line.run.rows.find((one) => one.epoch === line.run.best);
    const x = row ? AXES[axis].of(line.run, row) : NaN;
    const y = row ? valueIn(chart, line, row) : null;
    if (!plot.series[i + 1].show || y === null || !(x >= plot.scales.x.min && x <= plot.scales.x.max)) return;
    ctx.save();
    ctx.strokeStyle = colour(COLOURS[line.hue % COLOURS.length]);
    ctx.fillStyle = colour("--panel");
    ctx.lineWidth = 2 * devicePixelRatio;
    ctx.setLineDash([]); // not that of the line drawn last
    ctx.beginPath();
    ctx.rect(bbox.left - 9, bbox.top - 9, bbox.width + 18, bbox.height + 18);
    ctx.clip();
    ctx.beginPath();
    ctx.arc(plot.valToPos(x, "x", true), plot.valToPos(y, "y", true), 4 * devicePixelRatio, 0, 2 * Math.PI);
    ctx.fill();
    ctx.stroke();
    ctx.restore();
  });
}

function tellBest() {
  const best = runs.filter((run) => run.best !== null).map((run) => run.best);
  document.getElementById("best").textContent = !best.length ? "" : runs.length > 1
    ? "A ring marks the best epoch of each job." : `A ring marks the best epoch, ${best[0]}.`;
}

function draw(keepsZoom = true) {
  if (!holder) return;
  const before = new Map(plots.map((plot, i) => {
    const hidden = charts[i].lines.filter((_line, at) => !plot.series[at + 1].show).map((line) => line.key);
    return [charts[i].key, {zoom: keepsZoom ? zoomOf(plot) : null, hidden}];
  }));
  plots.forEach((plot) => plot.destroy());
  plots = [];
  charts = charted();
  holder.replaceChildren();
  document.getElementById("no-curves").hidden = charts.length > 0;
  scales.hidden = !charts.length;
  for (const option of scales.querySelectorAll("option")) {
    option.hidden = option.disabled = !runs.some((run) => run.rows.some((row) => Number.isFinite(AXES[option.value].of(run, row))));
  }
  tellBest();
  const places = charts.map((chart) => { // all of them first: how wide one is depends on the others
    const box = document.createElement("div");
    box.className = "chart";
    const title = document.createElement("h3");
    title.textContent = chart.unit ? `${chart.title} (${chart.unit})` : chart.title;
    const canvas = document.createElement("div");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", summary(chart));
    box.append(title, canvas);
    holder.append(box);
    return canvas;
  });
  const {text, ticks: incrs} = AXES[axis];
  const line = {stroke: colour("--soft"), grid: {stroke: colour("--line"), width: 1}, ticks: {stroke: colour("--line")}};
  plots = charts.map((chart, i) => {
    const canvas = places[i];
    const {zoom, hidden} = before.get(chart.key) || {zoom: null, hidden: []};
    const plot = new uPlot({
      width: canvas.clientWidth, height: 180, scales: {x: {time: false}, y: {distr: chart.log ? 3 : 1}},
      legend: {markers: {width: 3, dash: (_plot, at) => (at && chart.lines[at - 1].hue >= COLOURS.length ? "dashed" : "solid")}},
      cursor: {drag: {x: true, y: false}, sync: {key: "charts", scales: ["x", null]}},
      axes: [
        {...line, incrs, values: (_plot, ticks) => ticks.map(text)},
        {...line, size: 64, values: (_plot, ticks) => ticks.map((tick) => (tick === null ? "" : shown(tick)))},
      ],
      series: [
        {label: axis, value: ({data: [x]}, at) => text(at ?? x[x.length - 1] ?? 0)},
        ...chart.lines.map((one, at) => ({
          label: one.label, stroke: colour(COLOURS[one.hue % COLOURS.length]), dash: one.hue < COLOURS.length ? [] : [6, 4],
          width: 2, spanGaps: true, points: {show: one.run.rows.length < 3, size: 7}, show: !hidden.includes(one.key),
          value: (of, _value, _line, under) => legendValue(of, at + 1, under),
        })),
      ],
      hooks: {draw: [(of) => ring(of, chart)]},
    }, points(chart), canvas);
    if (zoom) plot.setScale("x", zoom);
    return plot;
  });
}

function addRow(row) {
  if (!holder) return;
  const [run] = runs;
  const {rows} = run;
  const at = rows.findIndex((one) => one.epoch >= row.epoch);
  if (at < 0) rows.push(row);
  else rows.splice(at, rows[at].epoch === row.epoch ? 1 : 0, row);
  if (typeof row.val_loss === "number" && row.val_loss < (run.loss ?? Infinity)) [run.loss, run.best] = [row.val_loss, row.epoch];
  const lines = (some) => some.flatMap((chart) => chart.lines).length;
  if (rows.length < 4 || lines(charted()) > lines(charts)) {
    draw();
    return;
  }
  tellBest();
  plots.forEach((plot, i) => {
    const zoom = zoomOf(plot);
    plot.batch(() => {
      plot.setData(points(charts[i]), !zoom);
      if (zoom) plot.setScale("x", zoom);
    });
    plot.root.parentElement.setAttribute("aria-label", summary(charts[i]));
  });
}

if (scales) {
  scales.addEventListener("change", () => {
    const other = scales.elements.axis.value;
    const keepsZoom = axis === other;
    [axis, logarithmic] = [other, scales.elements.log.checked];
    draw(keepsZoom);
  });
}

// Parts of a page are not replaced by their new HTML: what differs is changed in place. So a click, a tick, the
// focus, an open menu and a selection of text outlive an update. Children with an id are known by it.

const OURS = ["open", "data-once", "aria-busy"]; // attributes that this script and the browser change

function update(node, next) {
  if (node.isEqualNode(next)) return;
  if (node.nodeType !== Node.ELEMENT_NODE) {
    node.data = next.data;
    return;
  }
  for (const {name, value} of [...next.attributes]) if (!OURS.includes(name)) node.setAttribute(name, value);
  for (const {name} of [...node.attributes]) if (!next.hasAttribute(name) && !OURS.includes(name)) node.removeAttribute(name);
  updateChildren(node, next);
}

function updateChildren(node, next) {
  const wanted = new Set([...next.children].map((child) => child.id));
  for (const child of [...node.children]) if (child.id && !wanted.has(child.id)) child.remove();
  const known = new Map([...node.children].filter((child) => child.id).map((child) => [child.id, child]));
  let at = node.firstChild;
  for (const child of [...next.childNodes]) {
    let same = known.get(child.id);
    if (same) {
      while (at && at !== same && !at.id) { // what is left of removed ones: to move `same` would take its focus
        const gone = at;
        at = at.nextSibling;
        gone.remove();
      }
    } else if (at && !at.id && !child.id && at.nodeName === child.nodeName) same = at;
    if (!same) node.insertBefore(child, at);
    else {
      if (same === at) at = at.nextSibling;
      else node.insertBefore(same, at);
      if (same.nodeName === child.nodeName) update(same, child);
      else same.replaceWith(child);
    }
  }
  while (at) {
    const gone = at;
    at = at.nextSibling;
    gone.remove();
  }
}

// Where the focus goes when its element is gone: the nearest part around it that can have it, not the whole page.
function keepFocus(part, change) {
  const focused = document.activeElement;
  const around = [];
  if (part.contains(focused)) for (let one = focused.parentElement; one !== part.parentElement; one = one.parentElement) around.push(one);
  change();
  if (!around.length || document.activeElement === focused) return;
  const home = focused.isConnected ? focused : around.find((one) => one.isConnected && one.hasAttribute("tabindex")) || part;
  if (home === part && !part.hasAttribute("tabindex")) part.tabIndex = -1;
  home.focus({preventScroll: true});
}

function renew(part, html) {
  const fresh = document.createElement("template");
  fresh.innerHTML = html;
  keepFocus(part, () => updateChildren(part, fresh.content));
  htmx.process(part);
}

document.addEventListener("htmx:beforeSwap", (event) => {
  const {requestConfig, target, serverResponse, shouldSwap} = event.detail;
  if (requestConfig.verb !== "get" || !shouldSwap) return;
  event.detail.shouldSwap = false;
  const lines = target.querySelector("#lines");
  if (lines) {
    const {scrollTop: top, clientHeight, scrollHeight, textContent: text} = lines;
    reading = {atEnd: top + clientHeight >= scrollHeight - 8, top, text};
  }
  renew(target, serverResponse);
  const now = target.querySelector("#lines");
  if (now) place(now);
  if (target.id === "jobs") showTicked();
});

// Forms whose fields are sent as JSON: `config.epochs` is the member `epochs` of the member `config`.

function valueOf(field) {
  const kind = field.dataset.kind;
  if (field.type === "checkbox") return field.checked;
  if (kind === "tags") return field.value.split(",").map((tag) => tag.trim()).filter(Boolean);
  if (field.multiple) return [...field.selectedOptions].map((option) => option.value);
  const text = field.value.trim();
  if (text === "") return undefined;
  if (kind === "number" || kind === "integer") return Number(text) * Number(field.dataset.factor || 1);
  if (kind === "boolean") return text === "true";
  if (kind === "list") return text.split(/[\s,]+/);
  return field.dataset.setting ? jsonOrText(text) : text;
}

function jsonOrText(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

function bodyOf(form, pressed) {
  const body = {};
  const fields = [...form.elements].filter((field) => field.name && (field.tagName !== "BUTTON" || field === pressed));
  for (const field of fields) {
    const value = field.disabled ? undefined : valueOf(field);
    if (value === undefined) continue;
    const path = field.dataset.setting ? ["config", "settings", field.dataset.setting] : field.name.split(".");
    const last = path.pop();
    let at = body;
    for (const name of path) at = at[name] ||= {};
    at[last] = Array.isArray(at[last]) ? [...new Set([...at[last], ...value])] : value;
  }
  return body;
}

async function ask(address, method, body, headers = {}) {
  const response = await fetch(address, {
    method, headers: {"Content-Type": "application/json", Accept: "application/json", ...headers},
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  const kind = response.headers.get("content-type") || "";
  const answer = kind.includes("json") && response.status !== 204 ? await response.json() : {};
  return {status: response.status, ok: response.ok, answer, address: response.url};
}

// What is wrong with a field stands below it, belongs to it for screen readers, and goes when the field changes.
function showFault(field, problem) {
  const [input, place] = [field.querySelector("input, select"), field.querySelector(".fault")];
  place.id ||= `fault-${input.id}`;
  place.textContent = problem;
  place.hidden = !problem;
  const others = (input.getAttribute("aria-describedby") || "").split(" ").filter((id) => id && id !== place.id);
  input.setAttribute("aria-describedby", [...others, ...(problem ? [place.id] : [])].join(" "));
  if (problem) input.setAttribute("aria-invalid", "true");
  else input.removeAttribute("aria-invalid");
}

function showFaults(form, fields) {
  const places = [...form.querySelectorAll("[data-path]")].filter((one) => !one.closest("[hidden]"));
  for (const field of places) showFault(field, "");
  let left = 0;
  for (const {path, problem} of fields) {
    const field = places.find(({dataset}) => path === dataset.path || path.startsWith(`${dataset.path}.`));
    if (!field) {
      left += 1;
      continue;
    }
    showFault(field, problem);
    const details = field.closest("details");
    if (details) details.open = true;
  }
  const first = form.querySelector("[aria-invalid]");
  if (first) first.focus();
  return left === 0 && fields.length > 0;
}

document.addEventListener("input", (event) => {
  const field = event.target.closest("[data-path]");
  if (field && event.target.hasAttribute("aria-invalid")) showFault(field, "");
});

// Fact and hint of a request that was refused, a line each.
function why(answer) {
  return [answer.fact || answer.error, answer.hint].filter(Boolean).join("\n");
}

// Returns an operation when it has ended; null if the session has.
async function ended(operation, place) {
  let now = operation;
  while (now.state === "running") {
    const far = now.total ? `${now.done.toLocaleString("en")} of ${now.total.toLocaleString("en")}, ` : "";
    place.textContent = `${now.what}: ${far}${now.seconds.toFixed(0)} s so far`;
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    const reply = await ask(`/api/v1/training/operations/${now.id}`, "GET");
    if (reply.status === 401) {
      sessionEnded();
      return null;
    }
    now = reply.ok ? reply.answer : {state: "failed", error: why(reply.answer)};
  }
  return now;
}

async function finish(operation, place) {
  const now = await ended(operation, place);
  if (!now) return;
  if (now.state !== "failed" && "report" in (now.result || now)) { // of a data set, which the page shows
    location.reload();
    return;
  }
  const text = document.createElement("p");
  text.className = now.state === "failed" ? "problem" : "lines";
  text.textContent = now.state === "failed" ? now.error : told(now.result);
  place.replaceChildren(text);
  if (now.state !== "failed" && "caches" in now.result) {
    text.title = now.result.removed.map((item) => item.path).join("\n");
    showClean(now.result, text);
  }
}

// Asks whether to delete what a preview lists; returns false, with the preview shown, if that is nothing.
async function confirmed(operation, place) {
  const preview = await ended(operation, place);
  if (!preview) return false;
  if (preview.state === "failed" || !preview.result.removed.length) {
    await finish(preview, place);
    return false;
  }
  place.replaceChildren();
  return confirm(question(preview.result));
}

function question(result) {
  const caches = result.caches.filter((one) => one.removed).length;
  const others = result.removed.length - caches;
  const parts = [[caches, "cache"], [others, "leftover file"]].filter(([count]) => count);
  const text = parts.map(([count, name]) => `${count} ${name}${count === 1 ? "" : "s"}`).join(" and ");
  return `Delete ${text}, ${size(result.bytes_removed)}, permanently?`;
}

function told(result) {
  if ("ok" in result && "bad" in result) {
    if (!result.bad.length) return `All ${result.records.toLocaleString("en")} records match their checksums.`;
    const some = result.bad.slice(0, 5).map((one) => `record ${one.index} in ${one.shard}: ${one.why}`).join("\n");
    return `${result.bad.length} of ${result.records} records are damaged.\n${some}`;
  }
  if ("removed" in result) return cleaned(result).join("\n");
  return JSON.stringify(result, null, 1).replace(/[{}"]/g, "").trim() || "Nothing.";
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let left = bytes;
  for (; left >= 1024 && unit < units.length - 1; unit += 1) left /= 1024;
  return `${left.toFixed(unit === 0 || left >= 100 ? 0 : 1)} ${units[unit]}`;
}

function element(name, text, className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = className;
  return made;
}

// The use of a cache is noted at most once an hour.
function lastUsed(seconds) {
  if (seconds < 3600) return "within the last hour";
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}

// What a clean-up removes: a sentence, and a line for each thing that is no cache; those are rows of a table.
function cleaned(result) {
  const left = `${size(result.bytes_left)} ${result.dry_run ? "would be" : "are"} left.`;
  const some = result.removed.length ? `${result.dry_run ? "This would remove" : "Removed"} ${size(result.bytes_removed)}; ${left}`
    : `Nothing ${result.dry_run ? "would go" : "went"}; ${left}`;
  const known = new Set(result.caches.map((one) => `${one.name}/${one.fingerprint}`));
  const rest = result.removed.filter((item) => !known.has(item.path.split("/").slice(-2).join("/")));
  return [some, ...rest.map((item) => `${brief(item.path)}, ${size(item.bytes)}: ${item.reason}`)];
}

// The end of a path; of a digest its first digits.
function brief(path) {
  return path.split("/").slice(-3).join("/").replace(/([0-9a-f]{12})[0-9a-f]{20,}/g, "$1…");
}

// A row for each cache, those that go first: its name, what becomes of it, the rule, its size and its last use.
function cleanRows(result) {
  const goes = result.dry_run ? "would go" : "removed";
  return [...result.caches].sort((a, b) => b.removed - a.removed)
    .map((one) => [`${one.name}/${one.fingerprint}`, one.removed ? goes : "stays", one.rule, size(one.bytes), lastUsed(one.unused_s)]);
}

function showClean(result, text) {
  const scroll = element("div", "", "scroll");
  const table = element("table", "", "list");
  const names = ["Cache", "Clean-up", "Why", "Size", "Last used"];
  const kinds = ["", "", "words", "num", "num"];
  const head = table.createTHead().insertRow();
  names.forEach((name, at) => head.append(element("th", name, kinds[at] === "num" ? "num" : "")));
  const body = table.createTBody();
  for (const cells of cleanRows(result)) {
    const row = body.insertRow();
    cells.forEach((cell, at) => {
      const made = element("td", at === 1 ? "" : cell, kinds[at]);
      if (at === 1) made.append(element("span", cell, cell === "stays" ? "state good" : "state bad"));
      made.dataset.label = names[at];
      row.append(made);
    });
    const link = document.querySelector(`a[href="/caches/${cells[0]}"]`);
    if (link && cells[1] === "removed") link.closest("tr").remove();
  }
  scroll.append(table);
  if (result.caches.length) text.after(scroll);
}

// Work that was started by an earlier look at this page.
const running = document.querySelector("[data-running]");
if (running && running.dataset.running) {
  finish({id: running.dataset.running, what: "Running", state: "running", seconds: 0}, running).catch(() => news());
}

// A field that is refused in a folded part of a form would be refused without a word.
document.addEventListener("invalid", (event) => {
  const folded = event.target.closest("details");
  if (folded) folded.open = true;
}, true);

document.addEventListener("submit", async (event) => {
  const form = event.target;
  if (!form.matches("[data-json]")) return;
  event.preventDefault();
  if (form.getAttribute("aria-busy") === "true") return;
  const pressed = event.submitter;
  say("");
  const body = bodyOf(form, pressed);
  const headers = "once" in form.dataset ? {"Idempotency-Key": form.dataset.once ||= crypto.randomUUID()} : {};
  form.setAttribute("aria-busy", "true"); // not `disabled`, which takes the focus
  try {
    const send = (some) => ask(form.getAttribute("action"), form.dataset.method || "POST", some, headers);
    const asks = pressed && "preview" in pressed.dataset;
    let reply = await send(asks ? {...body, dry_run: true} : body);
    if (asks && reply.ok) {
      if (!await confirmed(reply.answer, document.querySelector(form.dataset.operation))) return;
      reply = await send(body);
    }
    const {ok, status, answer, address} = reply;
    filled &&= !ok;
    if (status === 401) sessionEnded();
    else if (!ok) {
      if ("once" in form.dataset) form.dataset.once = "";
      if (!showFaults(form, answer.fields || [])) say(why(answer) || "the service refused this");
    } else if (form.dataset.then) location.assign(form.dataset.then.replace("{id}", encodeURIComponent((answer.dataset || answer).id)));
    else if (form.dataset.operation) await finish(answer, document.querySelector(form.dataset.operation));
    else if (form.matches(".leave")) location.assign(address);
    else news();
  } catch {
    say("the service does not answer. Is it still running?");
  } finally {
    form.removeAttribute("aria-busy");
  }
});

// Fields that do not apply to the chosen data sets are hidden, and not sent.

const sets = document.getElementById("dataset_ids");

function fit() {
  const kinds = [...sets.selectedOptions].map((option) => option.dataset.of);
  for (const field of document.querySelectorAll("[data-kinds]")) {
    field.hidden = kinds.length > 0 && !kinds.some((kind) => field.dataset.kinds.split(" ").includes(kind));
    if (field.matches(".field")) field.querySelector("input, select").disabled = field.hidden;
  }
}

if (sets && sets.selectedOptions) {
  sets.addEventListener("change", fit);
  fit();
}

// Forms that early.js has kept.
document.removeEventListener("submit", keep);
for (const [form, pressed] of early) form.requestSubmit(pressed);

// The list of jobs: its filter, which the address keeps, and what is done with all selected jobs.

const find = document.getElementById("find");
const bulk = document.getElementById("bulk");
const JOBS = "/api/v1/training/jobs";
const BULK = {pause: "Paused", resume: "Resumed", cancel: "Cancelled", delete: "Deleted", tag: "Tagged"};
const LOST = {cancel: "Their checkpoints stay.", delete: "Their metrics, logs and checkpoints are lost. Caches stay."};
let typing = 0;
let working = Promise.resolve();

function picked() {
  return [...document.querySelectorAll("#jobs input[name=ids]:checked")];
}

function counted(count) {
  return `${count} ${count === 1 ? "job" : "jobs"}`;
}

function showTicked() {
  const [boxes, all] = [picked(), document.getElementById("pick-all")];
  const count = document.querySelectorAll("#jobs input[name=ids]").length;
  if (all) {
    all.checked = boxes.length > 0 && boxes.length === count;
    all.indeterminate = boxes.length > 0 && boxes.length < count;
  }
  const hadFocus = bulk.contains(document.activeElement);
  bulk.hidden = !boxes.length;
  document.getElementById("ticked").textContent = `${counted(boxes.length)} selected`;
  bulk.querySelector("#compare button").disabled = boxes.length > 8
    || boxes.filter((box) => box.dataset.kindOf === "training").length < 2;
  bulk.querySelector("[data-bulk=clone]").disabled = boxes.length !== 1 || boxes[0].dataset.kindOf !== "training";
  if (hadFocus && bulk.hidden) document.getElementById("bulk-result").focus({preventScroll: true});
}

function search() {
  clearTimeout(typing);
  const query = new URLSearchParams([...new FormData(find)].filter(([name, value]) => value && !(name === "sort" && value === "-created")));
  history.replaceState(null, "", query.size ? `/?${query}` : "/");
  const list = document.getElementById("jobs");
  list.setAttribute("hx-get", `/parts/jobs?${query}`);
  htmx.process(list);
  htmx.trigger(document.body, "news");
}

// One action after another, each with the jobs that were selected when its button was pressed.
function forEachPicked(what, request) {
  const boxes = picked();
  if (!boxes.length) return;
  if (what in LOST && !confirm(`${what === "delete" ? "Delete" : "Cancel"} ${counted(boxes.length)}? ${LOST[what]}`)) return;
  working = working.then(() => sendAll(what, boxes, request));
}

async function sendAll(what, boxes, request) {
  bulk.setAttribute("aria-busy", "true");
  say("");
  const refused = [];
  try {
    for (const box of boxes) {
      const {ok, status, answer} = await request(`${JOBS}/${encodeURIComponent(box.value)}`);
      if (status === 401) {
        sessionEnded();
        return;
      }
      if (!ok) refused.push(`${box.dataset.name}: ${why(answer) || `refused (${status})`}`);
    }
  } catch {
    say("the service does not answer. Is it still running?");
    return;
  } finally {
    bulk.removeAttribute("aria-busy");
  }
  const text = document.createElement("p");
  text.className = refused.length ? "problem" : "hint";
  const done = boxes.length - refused.length;
  text.textContent = [`${BULK[what]} ${done} of ${counted(boxes.length)}.`, ...refused].join("\n");
  document.getElementById("bulk-result").replaceChildren(text);
  news();
}

if (bulk && find) {
  find.addEventListener("input", (event) => {
    if (event.target.name !== "q") return;
    clearTimeout(typing);
    typing = setTimeout(search, 300);
  });
  find.addEventListener("change", search);
  find.addEventListener("submit", (event) => {
    event.preventDefault();
    search();
  });
  document.getElementById("jobs").addEventListener("change", (event) => {
    if (event.target.id === "pick-all") {
      for (const box of document.querySelectorAll("#jobs input[name=ids]")) box.checked = event.target.checked;
    }
    showTicked();
  });
  bulk.addEventListener("click", (event) => {
    const what = event.target.dataset.bulk;
    if (what === "clone") location.assign(`/jobs/new?clone=${encodeURIComponent(picked()[0].value)}`);
    else if (what === "clear") {
      for (const box of picked()) box.checked = false;
      showTicked();
    } else if (what === "delete") forEachPicked(what, (job) => ask(job, "DELETE"));
    else if (what) forEachPicked(what, (job) => ask(`${job}/${what}`, "POST"));
  });
  document.getElementById("tagging").addEventListener("submit", (event) => {
    event.preventDefault();
    const field = document.getElementById("new-tags");
    const words = field.value.split(",").map((word) => word.trim()).filter((word) => word.replace(/^[-+]/, ""));
    const change = {
      add_tags: words.filter((word) => !word.startsWith("-")).map((word) => word.replace(/^\+/, "")),
      remove_tags: words.filter((word) => word.startsWith("-")).map((word) => word.slice(1)),
    };
    if (words.length) forEachPicked("tag", (job) => ask(job, "PATCH", change));
    field.value = "";
  });
  showTicked();
}

// Copies the text below a button; where the browser does not allow that, it is selected.

document.addEventListener("click", async (event) => {
  if (!event.target.matches("[data-copy]")) return;
  const text = event.target.parentElement.nextElementSibling;
  getSelection().selectAllChildren(text);
  try {
    await navigator.clipboard.writeText(text.textContent);
    event.target.textContent = "Copied";
  } catch {
    event.target.textContent = "Selected, press Ctrl+C";
  }
});

// Buttons that htmx sends.

document.addEventListener("htmx:afterRequest", (event) => {
  const {xhr, elt, successful, requestConfig} = event.detail;
  if (requestConfig.verb === "get") return;
  say("");
  if (successful && elt.dataset.then) location.assign(elt.dataset.then);
  else if (successful) news();
  else if (xhr.status === 401) sessionEnded();
  else if (xhr.responseText) say(why(JSON.parse(xhr.responseText)));
});

document.addEventListener("htmx:sendError", () => say("the service does not answer. Is it still running?"));
document.addEventListener("htmx:responseError", (event) => {
  if (event.detail.requestConfig.verb !== "get") return;
  if (event.detail.xhr.status === 401) sessionEnded();
  if (event.detail.xhr.status === 404) location.assign("/");
});

// The log stays at its end where somebody left it there, and else at the lines that are read.

let reading = {atEnd: true, top: 0, text: ""};

// Lines at the top of `before` that `after` does not have any more: a page has only the last lines of a log.
function dropped(before, after) {
  let at = 0;
  let count = 0;
  while (!after.startsWith(before.slice(at))) {
    at = before.indexOf("\n", at) + 1;
    if (!at) return 0;
    count += 1;
  }
  return count;
}

function place(lines) {
  const gone = dropped(reading.text, lines.textContent) * parseFloat(getComputedStyle(lines).lineHeight);
  lines.scrollTop = reading.atEnd ? lines.scrollHeight : reading.top - gone;
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) {
    width = innerWidth;
    draw();
  }
});

draw();
const log = document.getElementById("lines");
if (log) place(log);
const followed = document.querySelector("[data-events]");
if (followed) follow(followed.dataset.events);

// What a new job would do: asked for after a change, one request at a time.

const plan = document.getElementById("plan");
let planning = false;
let changed = false;
let soon = 0;

function sayPlan(text) {
  const hint = document.createElement("p");
  hint.className = "hint";
  hint.textContent = text;
  plan.replaceChildren(hint);
}

async function showPlan() {
  const form = document.querySelector("form.new");
  if (!sets) return;
  if (planning) {
    changed = true;
    return;
  }
  if (!form.checkValidity()) {
    sayPlan("Some fields are not complete.");
    return;
  }
  planning = true;
  changed = false;
  plan.setAttribute("aria-busy", "true");
  try {
    const answer = await fetch("/parts/plan", {
      method: "POST", headers: {"Content-Type": "application/json", Accept: "text/html"},
      body: JSON.stringify(bodyOf(form, null)),
    });
    if (answer.ok) plan.innerHTML = await answer.text();
    else if (answer.status === 401) sessionEnded();
    else sayPlan("The service refuses these settings; submitting says why.");
  } catch {
    sayPlan("The service does not answer.");
  } finally {
    planning = false;
    plan.removeAttribute("aria-busy");
    if (changed) showPlan();
  }
}

if (plan) {
  document.querySelector("form.new").addEventListener("change", () => {
    clearTimeout(soon);
    soon = setTimeout(showPlan, 400);
  });
  showPlan();
}
