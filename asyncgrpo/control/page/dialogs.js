// Questions, replies and runbooks, one dialog at a time.

import {get, tell} from "/api.js";
import {byId, make} from "/dom.js";
import {blocks} from "/markdown.js";

function open(...children) {
  const dialog = byId("dialog");
  dialog.replaceChildren(...children);
  if (!dialog.open) dialog.showModal();
}

const close = () => byId("dialog").close();
const closer = (text) => make("button", {onclick: close}, text);

/** Ask, then have the run do it, and show what it said. */
export function askAndTell(question, command) {
  const yes = make("button", {class: "strong", id: "yes", onclick: () => carryOut(command)}, "Yes");
  open(make("p", {}, question), make("div", {class: "row"}, closer("No"), yes));
}

async function carryOut(command) {
  open(make("p", {}, "…"));
  try {
    show(await tell(command));
  } catch (error) {
    show(error.message);
  }
}

export function show(text) {
  open(make("p", {id: "said"}, text), make("div", {class: "row"}, closer("Close")));
}

/** The page that says what to do about a problem, as it comes with the installation. */
export async function showRunbook(problem) {
  let text;
  try {
    text = (await get("/api/runbook", {name: problem.name})).text;
  } catch (error) {
    text = error.message;
  }
  open(make("small", {}, problem.runbook), ...blocks(text), make("div", {class: "row"}, closer("Close")));
}
