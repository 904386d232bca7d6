// The conversation: turns on the page and in memory, one answer at a time.

import { speed, stream } from "./answer.js";
import { speeds } from "./charts.js";

const NEAR_END = 48; // pixels: who reads further up is not scrolled

export class Chat {
  history = []; // messages that the next question goes with
  busy = null; // AbortController of the answer under way

  // on: {settings(), canSpeculate(), busy(bool), measured(answer), failed(error), say(words)}
  constructor(log, api, on) {
    this.log = log;
    this.api = api;
    this.on = on;
  }

  stop() {
    this.busy?.abort();
  }

  clear() {
    this.stop();
    this.history = [];
    this.log.querySelectorAll(".turn").forEach((turn) => turn.remove());
  }

  // Ask; resolves to whether an answer came (a stopped one counts).
  async ask(question) {
    const messages = [...this.history, { role: "user", content: question }];
    this.#turn("user", "You").words.textContent = question;
    const turn = this.#turn("assistant", "Model");
    const answer = await this.#stream(turn, messages, this.on.settings());
    if (answer === null) return false;
    if (this.log.contains(turn.root)) this.history = [...messages, { role: "assistant", content: answer.text }];
    if (answer.figures) this.#facts(turn, messages, answer);
    return true;
  }

  // Stream into a turn; null when it failed.
  async #stream(turn, messages, settings) {
    const stopper = new AbortController();
    const partial = { text: "", figures: null };
    this.busy = stopper;
    this.on.busy(true);
    turn.root.classList.add("busy");
    turn.root.setAttribute("aria-busy", "true");
    try {
      const answer = await stream(this.api, messages, settings, stopper.signal, (tokens) => {
        partial.text += tokens.map((token) => token.text).join("");
        this.#follow(() => turn.words.append(...tokens.flatMap(painted)));
      });
      answer.settings = settings;
      this.on.measured(answer);
      this.on.say(`Answer finished: ${answer.numTokens} tokens.`);
      return answer;
    } catch (error) {
      if (error.name === "AbortError") {
        turn.facts.append(fact("stopped"));
        this.on.say("Stopped.");
        return partial;
      }
      this.#follow(() => turn.root.append(paragraph("error", error.message)));
      this.on.failed(error);
      return null;
    } finally {
      turn.root.classList.remove("busy");
      turn.root.removeAttribute("aria-busy");
      if (this.busy === stopper) {
        this.busy = null;
        this.on.busy(false);
      }
    }
  }

  // What an answer took, and the offer to ask again in the other mode.
  #facts(turn, messages, answer) {
    const { figures, numTokens, finishReason } = answer;
    const rate = speed(answer);
    const parts = [
      `${numTokens} tokens`,
      ...(rate === null ? [] : [`${rate.toFixed(1)} tok/s`]),
      ...(figures.rounds ? [`τ ${figures.accepted_length.toFixed(2)}`, `${figures.accepted} of ${figures.drafted} drafts`] : [answer.mode === "off" ? "no speculation" : "no drafts"]),
      ...(finishReason === "length" ? ["cut at the token limit"] : []),
    ];
    this.#follow(() => turn.facts.append(...parts.map(fact), ...this.#comparison(turn, messages, answer)));
  }

  #comparison(turn, messages, answer) {
    const off = answer.mode !== "off"; // what to compare with
    if (!off && !this.on.canSpeculate()) return [];
    const button = document.createElement("button");
    button.type = "button";
    button.className = "quiet compare";
    button.textContent = off ? "Compare without speculation" : "Compare with speculation";
    button.addEventListener("click", () => {
      if (this.busy) return;
      this.#compare(turn, messages, answer, off ? "off" : "");
      button.remove();
    });
    return [button];
  }

  // The same question once more in the other mode, beneath the first answer.
  async #compare(turn, messages, first, mode) {
    const place = document.createElement("div");
    place.className = "comparison";
    const other = { root: place, words: paragraph("words", ""), facts: document.createElement("div") };
    other.facts.className = "facts";
    place.append(other.words, other.facts);
    this.#follow(() => turn.root.append(place));
    const second = await this.#stream(other, messages, { ...first.settings, mode });
    if (!second?.figures) return;
    const [on, off] = mode === "off" ? [first, second] : [second, first];
    const same = first.text === second.text;
    if (same) other.words.remove();
    const bars = [["with speculation", on], ["without", off]].map(([label, answer]) => ({
      label,
      value: speed(answer) ?? 0,
      note: `${answer.numTokens} tokens`,
    }));
    const drawn = document.createElement("div");
    place.prepend(drawn);
    if (bars.every((bar) => bar.value > 0)) speeds(drawn, bars, "");
    other.facts.append(fact(same ? "the same text" : "another text: sampled, or told apart by rounding"));
    this.#follow(() => {});
  }

  #turn(kind, name) {
    const root = document.createElement("article");
    root.className = `turn ${kind}`;
    const who = paragraph("hidden", `${name}:`);
    const words = paragraph("words", "");
    const facts = document.createElement("div");
    facts.className = "facts";
    root.append(who, words, ...(kind === "assistant" ? [facts] : []));
    this.log.append(root);
    this.log.scrollTop = this.log.scrollHeight;
    return { root, words, facts };
  }

  // Change the page, and stay at its end if that is where the reader is.
  #follow(change) {
    const { log } = this;
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
    change();
    if (atEnd) log.scrollTop = log.scrollHeight;
  }
}

// A token; the blanks before it are not coloured, so that lines break without a trace.
function painted({ text, origin }) {
  const word = text.trimStart();
  const span = document.createElement("span");
  span.className = origin;
  span.textContent = word;
  return [text.slice(0, text.length - word.length), ...(word ? [span] : [])];
}

function paragraph(kind, words) {
  const p = document.createElement("p");
  p.className = kind;
  p.textContent = words;
  return p;
}

function fact(words) {
  const span = document.createElement("span");
  span.textContent = words;
  return span;
}
