// Problems, each with its runbook, and advice, each with the button that follows it.

import {askAndTell, showRunbook} from "/dialogs.js";
import {byId, make} from "/dom.js";

export function drawNotes(status, problems) {
  byId("notes").replaceChildren(...problems.map(problem), ...status.advice.map(advice));
}

function problem(one) {
  const since = one.since ? `, since ${new Date(1000 * one.since).toLocaleString()}` : "";
  return make("div", {class: "note problem"}, make("b", {}, one.name), make("span", {class: "text"}, `${one.text}${since}`),
    make("button", {class: "link", onclick: () => showRunbook(one)}, one.runbook));
}

function advice(one) {
  const command = commandOf(one.command);
  const button = command && make("button", {class: "strong", onclick: () => askAndTell(`${one.sentence}. Do it: ${one.command}?`, command)},
    one.command);
  const evidence = one.sentence.includes(one.evidence) ? null : make("small", {}, one.evidence);
  return make("div", {class: "note advice"}, make("b", {}, "advice"), make("span", {class: "text"}, one.sentence, evidence), button);
}

/** A command as typed, for the API: `scale generators 3`, `set buffer.max_lag=4`, `pause`. Null for any other. */
export function commandOf(text) {
  const scale = /^scale generators (\d+)$/.exec(text);
  if (scale) return {command: "scale", generators: Number(scale[1])};
  const set = /^set ((?:[\w.]+=[\d.eE+-]+ ?)+)$/.exec(text);
  if (set) return {command: "set", settings: Object.fromEntries(set[1].trim().split(" ").map((pair) => pair.split("=")).map(([key, value]) => [key, Number(value)]))};
  return /^(pause|resume|drain|checkpoint|evaluate)$/.test(text) ? {command: text} : null;
}
