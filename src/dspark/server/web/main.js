// Joins the page's parts: fields, chat, the feed of rounds and the charts.

import { Speeds } from "./answer.js";
import { Api } from "./api.js";
import * as charts from "./charts.js";
import { Chat } from "./chat.js";
import { Feed, Rounds } from "./rounds.js";

const EXAMPLES = ["Why is the sky blue?", "Count from one to twenty in words.", "List the planets, one a line."];
const DRAW_EVERY = 150; // milliseconds

const $ = (id) => document.getElementById(id);
const api = new Api();
const rounds = new Rounds();
const measured = new Speeds();
let model = null; // the card of /v1/models
let timer = null;

const feed = new Feed(api, rounds, drawSoon, showState);
const chat = new Chat($("log"), api, {
  settings,
  canSpeculate: () => Boolean(model?.speculative?.drafter),
  busy: showBusy,
  measured: (answer) => { measured.add(answer); draw(); },
  failed: (error) => { if (error.status === 401) wantKey(); },
  say: (words) => { $("announcer").textContent = words; },
});

function settings() {
  return {
    model: model?.id,
    mode: $("mode").value,
    temperature: $("temperature").valueAsNumber,
    maxTokens: $("max-tokens").valueAsNumber,
    seed: $("seed").value === "" ? null : $("seed").valueAsNumber,
    system: $("system").value.trim(),
  };
}

async function send() {
  const field = $("message");
  const question = field.value.trim();
  if (!question || chat.busy) return;
  if (!model) return void (api.key ? feed.restart() : wantKey());
  const wrong = ["temperature", "max-tokens", "seed"].map($).find((input) => !input.checkValidity());
  if (wrong) {
    $("settings").open = true;
    wrong.reportValidity();
    return;
  }
  $("empty").hidden = true;
  field.value = "";
  fit(field);
  if (!(await chat.ask(question)) && !field.value) field.value = question; // to try again
  fit(field);
}

function showBusy(busy) {
  const focused = document.activeElement.matches("#send, #stop, .compare");
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  if (focused) $(busy ? "stop" : "message").focus();
  document.querySelectorAll(".compare").forEach((button) => { button.disabled = busy; });
}

function showState(state, card) {
  const words = { live: "live", off: "live, rounds not kept", key: "API key wanted", down: "no connection" };
  $("state").textContent = words[state];
  $("state").dataset.state = state === "off" ? "live" : state;
  if (card && card.id !== model?.id) showModel(card);
  if (state === "key") $("settings").open = true;
  if (state === "off") $("strip-text").textContent = "This server keeps no rounds (round_events = 0).";
}

function showModel(card) {
  model = card;
  $("model").textContent = card.id;
  document.title = `${card.id} · dspark`;
  const { drafter } = card.speculative ?? {};
  const choices = drafter ? [["", `on (${drafter})`], ["off", "off"]] : [["off", "no drafter here"]];
  $("mode").replaceChildren(...choices.map(([value, words]) => new Option(words, value)));
  showChosen();
}

function showChosen() {
  const { mode, temperature, maxTokens } = settings();
  const parts = [`speculation ${mode === "off" ? "off" : "on"}`, `temperature ${temperature}`, `at most ${maxTokens} tokens`];
  $("chosen").textContent = parts.join(" · ");
}

function wantKey() {
  $("settings").open = true;
  $("key").focus();
}

function drawSoon() {
  timer ??= setTimeout(draw, DRAW_EVERY);
}

function draw() {
  clearTimeout(timer);
  timer = null;
  const all = rounds.totals();
  $("num-rounds").textContent = all.rounds.toLocaleString("en");
  $("tau").textContent = all.rounds ? (all.output / all.rounds).toFixed(2) : "–";
  $("rate").textContent = all.verified ? `${Math.round((100 * all.accepted) / all.verified)} %` : "–";
  $("running").textContent = rounds.list.at(-1)?.running ?? "–";
  if (all.rounds) charts.strip($("strip"), rounds.list, showStripTotals);
  charts.positions($("positions"), rounds.positions());
  charts.reliability($("confidence"), rounds.reliability());
  charts.budgets($("budget"), rounds.budgets());
  charts.speeds($("speed"), measured.bars(), "No answer measured yet. Ask, then compare without speculation.");
}

function showStripTotals(fit) {
  const { rounds: count, drafted, verified, accepted, bonus } = rounds.totals(fit);
  $("strip-text").textContent = `${count} rounds: ${drafted} drafted, ${verified} verified, ${accepted} accepted, ${bonus} bonus`;
}

function fit(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

function wire() {
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("message").addEventListener("input", () => fit($("message")));
  $("message").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") chat.stop(); });
  $("stop").addEventListener("click", () => chat.stop());
  $("new").addEventListener("click", () => { chat.clear(); $("empty").hidden = false; $("message").focus(); });
  $("settings").addEventListener("input", showChosen);
  $("key").addEventListener("change", () => { api.key = $("key").value.trim(); feed.restart(); });
  $("view").addEventListener("click", () => {
    const figures = document.body.dataset.view === "chat";
    document.body.dataset.view = figures ? "figures" : "chat";
    $("view").setAttribute("aria-expanded", String(figures));
    $("view").textContent = figures ? "Chat" : "Figures";
    draw();
  });
  new ResizeObserver(drawSoon).observe($("strip"));
  $("examples").append(...EXAMPLES.map((words) => {
    const item = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    button.className = "quiet";
    button.textContent = words;
    button.addEventListener("click", () => { $("message").value = words; send(); });
    item.append(button);
    return item;
  }));
}

wire();
draw();
feed.run();
