// Completions of a step or of an evaluation, searched, filtered, sorted. Their text is shown as text.

import {get} from "/api.js";
import {byId, figure, make, say} from "/dom.js";

const ONLY = {all: "all", better: "above their group", worse: "below their group", failed: "without a score",
  truncated: "cut by length", untrained: "not trained"};
const SORT = {file: "as trained", best: "best first", worst: "worst first", longest: "longest first", oldest: "oldest first"};
const OF = {samples: "trained", evals: "held-out"};
const PAGE = 10;

let offset = 0;
let newest = null;

export function setUpSamples() {
  const choice = (name, choices) => make("select", {name, onchange: fromTheStart},
    ...Object.entries(choices).map(([value, text]) => make("option", {value}, text)));
  byId("search").append(
    choice("of", OF),
    make("input", {type: "search", name: "search", placeholder: "search in prompts, completions, answers", oninput: soon}),
    make("input", {type: "number", name: "step", min: 0, placeholder: "step", onchange: fromTheStart}),
    choice("only", ONLY), choice("sort", SORT),
    make("button", {type: "button", id: "before", onclick: () => turn(-PAGE)}, "‹"),
    make("button", {type: "button", id: "after", onclick: () => turn(PAGE)}, "›"),
  );
  byId("search").addEventListener("submit", (event) => {
    event.preventDefault();
    fromTheStart();
  });
}

let timer;
function soon() {
  clearTimeout(timer);
  timer = setTimeout(fromTheStart, 300);
}

function fromTheStart() {
  offset = 0;
  return draw();
}

function turn(by) {
  offset = Math.max(0, offset + by);
  return draw();
}

/** A new step is shown when it comes, unless somebody reads: a step was chosen, or a completion is open. */
export function followSamples(step) {
  const isRead = new FormData(byId("search")).get("step") !== "" || offset || byId("samples").querySelector("details[open]");
  if (step === newest || isRead) return;
  newest = step;
  draw();
}

async function draw() {
  try {
    await drawSamples(Object.fromEntries(new FormData(byId("search"))));
  } catch (error) {
    say("found", error.message);
    byId("samples").replaceChildren();
  }
}

async function drawSamples({of, search, step, only, sort}) {
  const found = await get("/api/samples", {folder: of, search, step, only, sort, offset, limit: PAGE});
  const to = Math.min(offset + PAGE, found.found);
  say("found", `step ${found.step} (${found.first_step} to ${found.last_step} are kept): `
    + (found.found ? `${offset + 1} to ${to} of ${found.found} found, ` : "none found, ") + `${found.total} in all`);
  show(found.rows.map((row) => sample(row, search)), to >= found.found);
}

function show(cards, isLast) {
  byId("before").disabled = offset === 0;
  byId("after").disabled = isLast;
  byId("samples").replaceChildren(...cards);
}

const list = (parts) => make("dl", {}, ...parts.flatMap(([name, texts]) =>
  [make("dt", {}, name), make("dd", {}, make("pre", {}, ...texts))]));

function sample(row, searched) {
  const score = row.reward == null ? `failed: ${row.failure}` : `reward ${figure(row.reward)}`;
  const advantage = row.advantage == null ? "not trained" : `advantage ${row.advantage > 0 ? "+" : ""}${figure(row.advantage)}`;
  const mood = row.reward == null || row.advantage < 0 ? "bad" : row.advantage > 0 ? "good" : "";
  const ended = `${row.num_tokens} tokens, ${row.finish_reason}`;
  const summary = make("summary", {}, make("span", {class: mood}, score), make("span", {}, advantage),
    make("span", {}, `lag ${row.lag}`), make("span", {}, ended), make("span", {class: "dim"}, row.prompt_id),
    make("span", {class: "preview"}, row.completion.slice(0, 300)));
  const parts = [["prompt", row.prompt], ["completion", row.completion], ["answer", row.ground_truth], ["parts", row.parts],
    ["weights", row.version_oldest === row.version_newest ? row.version_newest : `${row.version_oldest} to ${row.version_newest}`]];
  const shown = list(parts.map(([name, text]) => [name, name === "completion" ? withObserved(row, searched) : marked(text, searched)]));
  const card = make("details", {class: "card sample"}, summary, shown);
  card.addEventListener("toggle", () => showImages(row, shown), {once: true});
  return card;
}

/** The images of the prompt, asked for when the card is first opened. A file of an older release names none. */
async function showImages(row, shown) {
  const images = await Promise.all(JSON.parse(row.images ?? "[]").map(async (file) => {
    const found = await get("/api/image", {digest: file.replace("images/", "")}).catch((error) => error);
    return found.url ? make("img", {src: found.url, alt: file, title: file}) : make("span", {class: "bad"}, found.message);
  }));
  if (images.length) shown.prepend(make("dt", {}, "images"), make("dd", {}, ...images));
}

/** The completion, with what an environment said set apart. A file of an older release does not say what that was. */
function withObserved({completion, observed}, searched) {
  const parts = [];
  let from = 0;
  for (const [start, end] of JSON.parse(observed ?? "[]")) {
    parts.push(...marked(completion.slice(from, start), searched),
      make("span", {class: "observed", title: "said by the environment"}, ...marked(completion.slice(start, end), searched)));
    from = end;
  }
  return [...parts, ...marked(completion.slice(from), searched)];
}

/** The text with what was searched for marked. */
function marked(text, searched) {
  if (!searched) return [text];
  const parts = [];
  const [lower, word] = [text.toLowerCase(), searched.toLowerCase()];
  let from = 0;
  for (let at = lower.indexOf(word); at >= 0; at = lower.indexOf(word, from)) {
    parts.push(text.slice(from, at), make("mark", {}, text.slice(at, at + word.length)));
    from = at + word.length;
  }
  return [...parts, text.slice(from)];
}
