// The rounds of the server as /rounds gives them, and what they come to.
// A round: {step, request, drafted, verified, accepted, output, bonus, confidence: [p], budget, running, waiting}.

const KEPT = 2000;
const BINS = 10;
const FIRST_WAIT = 1000; // milliseconds between two tries to connect
const LONGEST_WAIT = 30_000;
const STATES = { 401: "key", 404: "off" }; // answers that no new try changes

export class Rounds {
  list = [];

  // The rounds of one step. Those that it ended run no more when it tells how many do.
  add(step) {
    this.list.push(...step.map((round) => ({ ...round, together: Math.max(round.running, step.length) })));
    if (this.list.length > KEPT) this.list.splice(0, this.list.length - KEPT);
  }

  clear() {
    this.list = [];
  }

  totals(last = this.list.length) {
    const sum = { rounds: 0, drafted: 0, verified: 0, accepted: 0, bonus: 0, output: 0 };
    for (const round of this.list.slice(-last || this.list.length)) {
      sum.rounds += 1;
      sum.bonus += Number(round.bonus);
      for (const name of ["drafted", "verified", "accepted", "output"]) sum[name] += round[name];
    }
    return sum;
  }

  // [{judged, kept}] by position: rounds that verified the draft there, and those of them that accepted it.
  positions() {
    const found = [];
    for (const { verified, accepted } of this.list) {
      for (let i = 0; i < verified; i += 1) {
        found[i] ??= { judged: 0, kept: 0 };
        found[i].judged += 1;
        found[i].kept += Number(i < accepted);
      }
    }
    return found;
  }

  // [{count, confidence, kept}] in ten bins. A draft is judged if all before it were accepted: the confidence is
  // that of being accepted then.
  reliability() {
    const bins = Array.from({ length: BINS }, () => ({ count: 0, confidence: 0, kept: 0 }));
    for (const { verified, accepted, confidence } of this.list) {
      for (let i = 0; i < Math.min(verified, accepted + 1, confidence.length); i += 1) {
        const bin = bins[Math.min(BINS - 1, Math.floor(confidence[i] * BINS))];
        bin.count += 1;
        bin.confidence += confidence[i];
        bin.kept += Number(i < accepted);
      }
    }
    return bins.filter((bin) => bin.count).map(({ count, confidence, kept }) => ({
      count,
      confidence: confidence / count,
      kept: kept / count,
    }));
  }

  // [{running, steps, mean, low, high}]: drafts verified in a step, by how many requests ran in it.
  budgets() {
    const found = new Map();
    let last = null;
    for (const { step, budget, together: running } of this.list) {
      if (step === last) continue; // the other requests of the same step
      last = step;
      const at = found.get(running) ?? { running, steps: 0, mean: 0, low: budget, high: budget };
      at.steps += 1;
      at.mean += (budget - at.mean) / at.steps;
      at.low = Math.min(at.low, budget);
      at.high = Math.max(at.high, budget);
      found.set(running, at);
    }
    return [...found.values()].sort((a, b) => a.running - b.running);
  }
}

// Follow the feed until the page goes away; connects anew after a failure. `tell` gets "live", "off" (the server keeps
// no rounds), "key" or "down"; `restart` begins at once, for a key that has changed.
export class Feed {
  #stop = null;
  #wake = () => {};

  constructor(api, rounds, onRounds, tell) {
    this.api = api;
    this.rounds = rounds;
    this.onRounds = onRounds;
    this.tell = tell;
  }

  async run() {
    for (let wait = FIRST_WAIT; ; wait = Math.min(2 * wait, LONGEST_WAIT)) {
      let state = "down";
      try {
        await this.#follow(() => { wait = FIRST_WAIT; });
      } catch (error) {
        if (error.name === "AbortError") continue;
        state = STATES[error.status] ?? state;
      }
      this.tell(state);
      await new Promise((wake) => {
        this.#wake = wake;
        if (state === "down") setTimeout(wake, wait);
      });
    }
  }

  restart() {
    this.#stop?.abort();
    this.#wake();
  }

  async #follow(onConnected) {
    this.#stop = new AbortController();
    const model = (await this.api.get("v1/models")).data[0];
    onConnected();
    this.rounds.clear(); // what the server kept comes again
    this.tell("live", model);
    for await (const step of this.api.watch(`rounds?past=${KEPT}`, this.#stop.signal)) {
      this.rounds.add(step);
      this.onRounds();
    }
  }
}
