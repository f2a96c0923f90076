// The curves, drawn by uPlot: one card each, all with the same steps and the same cursor.

import {colour, colourOf, wordsOf} from "/colours.js";
import {byId, figure, make, thousands} from "/dom.js";
import {generatorSeconds, groupsOf, lagQuantile, learnerSeconds} from "/events.js";

const HEIGHT = 150;
const LEARNER = ["train", "publish", "checkpoint", "eval", "other", "wait_data"];
const GENERATORS = ["generate", "reward", "weights", "idle"];

const line = (label, name, values, more = {}) => ({label, colour: colour(name), values, ...more});

/** The cards: a title, the lines of it, and how a value is written. */
const CARDS = [
  {title: "Reward", lines: (events) => [
    line("train", "blue", events.steps.map((step) => step.reward_mean)),
    ...held(events),
  ]},
  {title: "Lag of trained groups, steps", lines: ({steps}) => [
    line("p90", "orange", steps.map((step) => lagQuantile(step.lags, 0.9)), {width: 4}),
    line("p50", "blue", steps.map((step) => lagQuantile(step.lags, 0.5))),
    line("bound", "grey", steps.map((step) => step.max_lag ?? null), {dash: [5, 4]}),
  ], from0: true},
  {title: "Tokens per second", lines: ({steps}) => [
    line("generated", "green", rate(steps, (step, before) => step.tokens_generated - before.tokens_generated)),
    line("trained", "blue", rate(steps, (step) => step.tokens_trained)),
  ], write: thousands, from0: true},
  {title: "A step of the learner, seconds", lines: ({steps}) => stacked(steps.map(learnerSeconds), LEARNER), from0: true},
  {title: "Time of the generators, share", lines: ({steps}) =>
    stacked(steps.map(generatorSeconds).map(shares), GENERATORS), from0: true, upTo: 1},
  {title: "Groups with signal, share", lines: ({steps}) => [
    line("not yet solved", "green", steps.map((step) => step.signal_share ?? null), {width: 4}),
    line("rewards differ", "blue", steps.map((step) => signal(step))),
  ], from0: true, upTo: 1},
];

const SUITES = ["orange", "green", "purple", "red", "grey"];

/** A line for each suite; for one alone it is called held-out. */
function held({steps, evals}) {
  const names = [...new Set(evals.flatMap((event) => Object.keys(event.suites ?? {})))].slice(0, SUITES.length);
  const score = names.length < 2 ? () => (event) => event.reward_mean
    : (name) => (event) => event.suites?.[name]?.numbers.reward?.[0];
  return (names.length < 2 ? ["held-out"] : names).map((name, i) => {
    const scores = new Map(evals.map((event) => [event.step, score(name)(event)]));
    return line(name, SUITES[i], steps.map((step) => scores.get(step.step) ?? null), {points: true});
  });
}

function rate(steps, tokens) {
  return steps.map((step, i) => {
    const from = Math.max(0, i - 5);  // the mean of five steps
    const seconds = step.time - steps[from].time;
    if (!i || seconds <= 0) return null;
    let sum = 0;
    for (let j = from + 1; j <= i; j++) sum += tokens(steps[j], steps[j - 1]) || 0;
    return Math.max(0, sum / seconds);
  });
}

const signal = (step) => (groupsOf(step) ? 1 - (step.zero_signal_groups ?? 0) / groupsOf(step) : null);

function shares(seconds) {
  const all = Object.values(seconds).reduce((sum, value) => sum + value, 0);
  return Object.fromEntries(Object.entries(seconds).map(([name, value]) => [name, all ? value / all : 0]));
}

/** Areas on top of each other: the last one is drawn first, and each covers what lies below it. */
function stacked(parts, order) {
  const there = order.filter((name) => parts.some((part) => part[name] > 0));
  const sums = parts.map(() => 0);
  const lines = there.map((name) => {
    parts.forEach((part, i) => { sums[i] += part[name] ?? 0; });
    return {label: wordsOf(name), colour: colourOf(name), values: [...sums], raw: parts.map((part) => part[name] ?? 0), fill: true};
  });
  return lines.reverse();
}

const plots = new Map();

export function drawCurves(events) {
  for (const card of CARDS) draw(card, events);
}

function draw(card, events) {
  const lines = card.lines(events);
  const data = [events.steps.map((step) => step.step), ...lines.map((each) => each.values)];
  const shape = JSON.stringify([lines.map((each) => [each.label, each.colour]), colour("ink")]);
  const plot = plots.get(card.title);
  if (plot && plot.shape === shape) {
    plot.lines = lines;
    plot.chart.setData(data);
    return;
  }
  const place = plot?.place ?? byId("curves").appendChild(make("div", {class: "card"}, make("h3", {}, card.title)));
  plot?.chart.destroy();
  const made = {place, shape, lines};
  plots.set(card.title, made);
  made.chart = new uPlot(options(card, made, widthIn(place)), data, place);
  if (!plot) new ResizeObserver(() => fit(plots.get(card.title))).observe(place);
}

function options(card, made, width) {
  const write = card.write ?? figure;
  const axis = {stroke: colour("dim"), grid: {stroke: colour("grid"), width: 1}, ticks: {show: false}, font: "11px system-ui"};
  return {
    width,
    height: HEIGHT,
    cursor: {sync: {key: "steps"}, points: {size: 6}, drag: {x: true, y: false}},
    legend: {markers: {width: 2}},
    scales: {x: {time: false}, y: {range: (_, low, high) => range(card, low, high)}},
    axes: [{...axis, size: 26}, {...axis, size: 46, values: (_, ticks) => ticks.map((tick) => write(tick))}],
    series: [{label: "step", value: (_, step) => step ?? "–"}, ...made.lines.map((each, i) => ({
      label: each.label,
      stroke: each.colour,
      fill: each.fill ? each.colour : undefined,
      width: each.fill ? 0 : (each.width ?? 1.6),
      dash: each.dash,
      spanGaps: true,
      points: {show: each.points ?? false, size: 6},
      value: (_, value, __, at) => write(shown(made.lines[i], at)),
    }))],
  };
}

/** The value under the cursor; without one the last there is. */
function shown({raw, values}, at) {
  return (raw ?? values)[at ?? values.findLastIndex((value) => value != null)];
}

function range(card, low, high) {
  if (low == null) return [0, 1];
  const bottom = card.from0 ? 0 : low;
  const top = card.upTo ?? high;
  const room = (card.upTo ? 0.02 : 0.06) * (top - bottom || Math.abs(top) || 1);
  return [card.from0 ? 0 : bottom - room, top + room];
}

const widthIn = (place) => Math.max(1, place.clientWidth - 22);

/** A card gets another width by the window, by its scroll bar, and by a phone that is turned. */
function fit({chart, place}) {
  if (chart.width !== widthIn(place)) chart.setSize({width: widthIn(place), height: HEIGHT});
}
