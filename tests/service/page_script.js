// Runs the script of the pages without a browser: `node page_script.js SCRIPT ANSWER`.
// A page follows events; its stream is refused, and the service answers ANSWER (JSON: a status and a body; null: it
// does not answer). Prints what a person sees afterwards. With a `result` in ANSWER it prints how that is told.
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [script, given] = process.argv.slice(2);
const answer = JSON.parse(given);
const elements = {};
const seen = {reloads: 0, streams: 0};

function element() {
  return {hidden: true, textContent: "", dataset: {}, content: "", addEventListener() {},
    span: null, querySelector() { return this.span ||= element(); }};
}

class EventSource {
  static CLOSED = 2;
  constructor() {
    seen.streams += 1;
    this.handlers = {};
    this.readyState = answer === null ? 0 : EventSource.CLOSED;
    if (seen.streams === 1) setImmediate(() => this.handlers.error());
  }
  addEventListener(kind, handler) { this.handlers[kind] = handler; }
  close() {}
}

const live = element();
live.dataset.events = "/api/v1/training/events?after=3";
const context = {
  URL, EventSource, AbortController, Math, JSON, Date, Promise, setImmediate,
  location: {href: "http://127.0.0.1/", reload() { seen.reloads += 1; }},
  document: {
    hidden: false, addEventListener() {}, removeEventListener() {}, documentElement: {}, body: {},
    getElementById(id) { return ["charts", "drawn", "lines", "scales", "plan", "find", "bulk"].includes(id) ? null : elements[id] ||= element(); },
    querySelector(text) { return text === "[data-events]" ? live : element(); },
  },
  htmx: {trigger() {}}, matchMedia: () => element(), addEventListener() {}, innerWidth: 100,
  setTimeout(work, wait) { return setTimeout(work, wait / 1000); },
  async fetch() {
    if (answer === null) throw new TypeError("no connection");
    const {status, body} = answer;
    return {status, ok: status < 400, headers: new Map([["content-type", "application/json"]]), json: async () => body};
  },
};
vm.createContext(context);
for (const one of [path.join(path.dirname(script), "early.js"), script]) {
  vm.runInContext(fs.readFileSync(one, "utf8"), context);
}
if (answer !== null && answer.result) {
  process.stdout.write(JSON.stringify([context.told(answer.result), context.cleanRows(answer.result), context.question(answer.result)]));
  process.exit(0);
}
setTimeout(() => {
  const shown = Object.fromEntries(Object.entries(elements).filter(([, one]) => !one.hidden)
    .map(([id, one]) => [id, one.span ? one.span.textContent : one.textContent]));
  process.stdout.write(JSON.stringify({...seen, shown}));
  process.exit(0);
}, 100);
