// The way of a group, with what was at each stop when the last batch was taken.

import {byId, figure, make, percent} from "/dom.js";
import {generatorSeconds, groupsOf, summed} from "/events.js";

export function drawFlow(status, events) {
  byId("flow").replaceChildren(...stops(status, events).map(({name, count, below, mood}) =>
    make("li", {class: mood}, make("span", {class: "name"}, name), make("b", {}, `${count ?? "–"}`), make("small", {}, below))));
}

function stops(status, events) {
  const {last} = events;
  const generators = status.processes.filter((process) => process.name.startsWith("generator"));
  const working = generators.filter((process) => process.state === "working").length;
  const seconds = summed(events.recent.map(generatorSeconds));
  const all = Object.values(seconds).reduce((sum, value) => sum + value, 0);
  const busy = all ? 1 - (seconds.idle ?? 0) / all : null;
  const failed = events.recent.reduce((sum, step) => sum + total(step.failures), 0);
  const wanted = last.wanted ?? last.slots;
  const wait = longestWait(status);
  return [
    {name: "prompts", count: last.prompts_done ?? 0, below: "done: trained, filtered or dropped"},
    {name: "leases", count: inFlight(last), below: wanted == null ? "groups in flight"
      : `groups in flight; ${wanted} wanted in flight and ready`},
    {name: "generators", count: `${working} / ${status.generators_wanted}`, mood: busy > 0.9 ? "busy" : "",
      below: busy == null ? "" : `busy ${percent(busy)} of their time`},
    {name: "rewards", count: events.paused.size ? "paused" : all ? percent((seconds.reward ?? 0) / all) : null,
      mood: events.paused.size || failed ? "waits" : "",
      below: failed ? `${failed} failed in the last steps` : "of the generators' time only rewards are awaited"},
    {name: "buffer", count: ready(last), below: last.ready_seconds == null ? "groups ready"
      : `groups ready; each waits ${figure(events.mean("ready_seconds"), 1)} s`},
    {name: "learner", count: last.lags ? groupsOf(last) : null, mood: wait ? "waits" : "busy",
      below: wait ? `waits for ${wait[0]}, ${figure(wait[1], 0)} s` : `groups in step ${status.step + 1}`},
    {name: "weights", count: events.sync ? `v${events.sync.version.split(".").at(-1)}` : null, mood: "",
      below: events.sync ? `at ${events.sync.engines} generators in ${figure(events.sync.ms, 0)} ms` : ""},
  ];
}

const total = (counts) => Object.values(counts ?? {}).reduce((sum, count) => sum + count, 0);
const inFlight = (step) => (step.generators ? Math.round(step.generators.in_flight) : null);
const ready = (step) => (step.generators && step.under_way != null ? Math.max(0, step.under_way - inFlight(step)) : null);

/** What the learner waits for now, if for longer than a second. */
function longestWait(status) {
  const learner = status.processes.find((process) => process.name.startsWith("learner"));
  const waits = Object.entries(learner?.waits ?? {}).filter(([, seconds]) => seconds > 1);
  return waits.sort((a, b) => b[1] - a[1])[0];
}
