// The page of a run: asks every two seconds, and draws what it hears.

import {get} from "/api.js";
import {drawControls, drawProcesses, drawSettings} from "/controls.js";
import {drawCurves} from "/curves.js";
import {byId, duration, figure, say, thousands} from "/dom.js";
import {Events} from "/events.js";
import {drawFlow} from "/flow.js";
import {drawNotes} from "/notes.js";
import {followSamples, setUpSamples} from "/samples.js";
import {drawShares} from "/shares.js";

const EVERY_MS = 2000;

const events = new Events();

async function look() {
  const [status, alerts, hasNews] = await Promise.all([get("/api/status"), get("/api/alerts"), events.follow()]);
  drawHead(status);
  drawControls(status);
  drawNotes(status, alerts.problems);
  drawFlow(status, events);
  drawSettings(status);
  drawProcesses(status);
  if (hasNews) {
    drawCurves(events);
    drawShares(events);
    say("since", events.isWhole || !events.steps.length ? "" : `from step ${events.steps[0].step} on`);
    followSamples(events.last.step);
  }
}

function drawHead(status) {
  document.title = `${status.run}: step ${status.step}`;
  say("run", status.run);
  say("state", status.state);
  byId("state").className = `chip ${status.state}`;
  const rate = events.stepsPerHour;
  say("step", status.state === "starting" ? `waits for ${status.waits_for}` : `step ${status.step}${status.steps ? ` of ${status.steps}` : ""}, reward ${figure(events.last.reward_mean)}`
    + (rate == null ? "" : `, ${thousands(rate)} steps/h`));
  byId("done").hidden = !status.steps;
  byId("done").value = status.steps ? status.step / status.steps : 0;
  say("clock", duration(Date.now() / 1000 - status.started));
}

function complain(error) {
  byId("banner").hidden = !error;
  say("banner", error?.message ?? "");
  if (error) {
    say("state", error.status === 401 ? "no access" : "no reply");
    byId("state").className = "chip silent";
    for (const button of byId("controls").children) button.disabled = true;
  }
}

async function goOn() {
  if (!document.hidden) {
    try {
      await look();
      complain(null);
    } catch (error) {
      complain(error);
    }
    document.body.dataset.looked = "yes";
  }
  setTimeout(goOn, EVERY_MS);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  drawCurves(events);
  drawShares(events);
});
setUpSamples();
goOn();
