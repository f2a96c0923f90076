// What the events of a run say: kept as they come, summed up as the page needs it.

import {get} from "/api.js";
import {mean} from "/dom.js";

const FIRST_BYTES = 3_000_000;
const MOST_STEPS = 5_000;
export const RECENT = 10;

const GROUPED = {forward_backward: "train", optimizer: "train"};

export class Events {
  constructor() {
    this.forget();
  }

  forget() {
    this.steps = [];
    this.evals = [];
    this.sync = null;
    this.paused = new Set();
    this.next = -FIRST_BYTES;
    this.file = "";
    this.isWhole = true;
  }

  /** Read what came since the last time. Returns whether anything did. */
  async follow() {
    const before = this.next;
    for (;;) {
      const part = await get("/api/events", {after: this.next, file: this.file, limit: 5000});
      if (part.rewound) {
        this.steps = [];
        this.evals = [];
        this.paused.clear();
      }
      if (!this.file) this.isWhole = part.size <= FIRST_BYTES;
      part.events.forEach((event) => this.take(event));
      if (this.steps.splice(0, this.steps.length - MOST_STEPS).length) {
        this.evals = this.evals.filter((one) => one.step >= this.steps[0].step);
        this.isWhole = false;
      }
      const isStuck = part.next === this.next;
      this.next = part.next;
      this.file = part.file;
      if (isStuck || part.next >= part.size) break;
    }
    return this.next !== before;
  }

  take(event) {
    if (event.event === "step") {
      while (this.steps.length && this.steps.at(-1).step >= event.step) this.steps.pop();
      this.steps.push(event);
    } else if (event.event === "eval") {
      this.evals = this.evals.filter((one) => one.step !== event.step);
      this.evals.push(event);
    } else if (event.event === "sync") {
      this.sync = event;
    } else if (event.event === "rewards_paused") {
      this.paused.add(event.actor);
    } else if (event.event === "rewards_resumed") {
      this.paused.delete(event.actor);
    } else if (event.event === "start") {
      this.paused.clear();
    }
  }

  get recent() {
    return this.steps.slice(-RECENT);
  }

  get last() {
    return this.steps.at(-1) ?? {};
  }

  mean(name) {
    return mean(this.recent.map((step) => step[name]).filter((value) => value != null));
  }

  /** Optimizer steps an hour, over the last ones. */
  get stepsPerHour() {
    const seconds = this.recent.flatMap((step) => Object.values(step.seconds ?? {})).reduce((sum, value) => sum + value, 0);
    return seconds > 0 ? (3600 * this.recent.length) / seconds : null;
  }
}

/** Seconds of the learner by activity; forward, backward and optimizer together are `train`. */
export function learnerSeconds(step) {
  return grouped(Object.entries(step.seconds ?? {}));
}

/** Seconds of all generators by activity. */
export function generatorSeconds(step) {
  const told = step.generators ?? {};
  return grouped(["generate", "reward", "weights", "idle"].filter((name) => name in told).map((name) => [name, told[name]]));
}

function grouped(entries) {
  const sums = {};
  for (const [name, seconds] of entries) sums[GROUPED[name] ?? name] = (sums[GROUPED[name] ?? name] ?? 0) + seconds;
  return sums;
}

/** What several steps say together. */
export function summed(parts) {
  return grouped(parts.flatMap((part) => Object.entries(part)));
}

/** The smallest lag that a share of the groups does not exceed. */
export function lagQuantile(lags, share) {
  const rows = Object.entries(lags ?? {}).map(([lag, groups]) => [Number(lag), groups]).sort((a, b) => a[0] - b[0]);
  let left = share * rows.reduce((sum, row) => sum + row[1], 0);
  for (const [lag, groups] of rows) {
    left -= groups;
    if (left <= 0) return lag;
  }
  return null;
}

export const groupsOf = (step) => Object.values(step.lags ?? {}).reduce((sum, groups) => sum + groups, 0);
