// The buttons above, and the forms of the settings that may change while the run goes on.

import {askAndTell, show} from "/dialogs.js";
import {byId, make} from "/dom.js";

const BUTTONS = [
  ["pause", "Pause", "Pause the run? What is in flight is finished and kept.", ["training", "starting"]],
  ["resume", "Resume", "Let the run go on?", ["paused"]],
  ["checkpoint", "Checkpoint", "Write a checkpoint after the step in flight?", ["training"]],
  ["evaluate", "Evaluate", "Evaluate on data.eval after the step in flight?", ["training"]],
  ["drain", "Drain", "End the run in order? The step in flight is finished and a checkpoint is written.", ["training", "paused", "starting"]],
];

export function drawControls(status) {
  const controls = byId("controls");
  if (!controls.children.length) {
    controls.append(...BUTTONS.map(([command, label, question]) =>
      make("button", {id: command, onclick: () => askAndTell(question, {command})}, label)));
  }
  for (const [command, , , states] of BUTTONS) byId(command).disabled = !states.includes(status.state);
}

let shown = "";

/** The forms are made anew only if what is in force has changed: somebody may be typing. */
export function drawSettings(status) {
  const now = JSON.stringify([status.settings, status.generators_wanted, status.generators_min, status.generators_max]);
  if (now === shown) return;
  shown = now;
  const fields = Object.entries(status.settings).map(([key, value]) => field(key, value));
  const limits = `generators (${status.generators_min} to ${status.generators_max})`;
  const form = byId("settings");
  form.replaceChildren(field("generators", status.generators_wanted, limits), ...fields,
    make("button", {class: "strong", type: "submit"}, "Change"));
  form.onsubmit = (event) => {
    event.preventDefault();
    change(status, new FormData(form));
  };
}

function field(name, value, label = name) {
  return make("label", {}, label, make("input", {name, value, autocomplete: "off", inputmode: "decimal"}));
}

function change(status, form) {
  const typed = Object.fromEntries([...form].filter(([key, value]) => value.trim() !== before(status, key)));
  const names = Object.keys(typed);
  const odd = names.find((key) => typed[key].trim() === "" || !Number.isFinite(Number(typed[key])));
  if (odd) return show(`${odd}: "${typed[odd]}" is no number`);
  if (!names.length) return show("nothing is changed");
  const said = names.map((key) => `${key}: ${before(status, key)} → ${typed[key]}`).join("; ");
  if (names.includes("generators") && names.length > 1) return show("change the number of generators by itself");
  if (names.includes("generators")) return askAndTell(`${said}?`, {command: "scale", generators: Number(typed.generators)});
  askAndTell(`${said}?`, {command: "set", settings: Object.fromEntries(names.map((key) => [key, Number(typed[key])]))});
}

const before = (status, key) => `${key === "generators" ? status.generators_wanted : status.settings[key]}`;

export function drawProcesses(status) {
  const head = ["process", "state", "pid", "restarts", "last heard", "waits for"];
  const rows = status.processes.map((process) => [
    process.name, process.state, process.pid ?? "–", process.restarts,
    process.heard_s == null ? "–" : `${process.heard_s.toFixed(1)} s ago`,
    Object.entries(process.waits).filter(([, seconds]) => seconds > 0).map(([what, seconds]) => `${what} ${seconds.toFixed(0)} s`).join(", "),
  ]);
  byId("processes").replaceChildren(
    make("tr", {}, ...head.map((text) => make("th", {}, text))),
    ...rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, `${cell}`)))),
  );
}
