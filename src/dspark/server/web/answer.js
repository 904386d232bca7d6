// One answer of the model: asked, streamed and measured.

// Body of a chat completion. settings: {model, mode, temperature, maxTokens, seed, system}; mode "" = as the server plans.
export function request(messages, settings) {
  const { model, mode, temperature, maxTokens, seed, system } = settings;
  return {
    model,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature,
    max_tokens: maxTokens,
    ...(seed === null ? {} : { seed }),
    stream: true,
    stream_options: { include_usage: true },
    speculative: { origins: true, ...(mode ? { mode } : {}) },
  };
}

// Stream an answer; onTokens gets [{text, origin}] as they come. Throws what fetch throws, AbortError when stopped.
export async function stream(api, messages, settings, signal, onTokens) {
  const answer = { text: "", finishReason: null, numTokens: 0, figures: null, mode: settings.mode };
  for await (const chunk of api.ask("v1/chat/completions", request(messages, settings), signal)) {
    for (const { delta, tokens, finish_reason: reason } of chunk.choices) {
      answer.text += delta.content ?? "";
      answer.finishReason = reason ?? answer.finishReason;
      if (tokens?.length) onTokens(tokens.map((token) => ({ ...token, origin: shown(token.origin, settings.mode) })));
    }
    answer.figures = chunk.speculative ?? answer.figures;
    answer.numTokens = chunk.usage?.completion_tokens ?? answer.numTokens;
  }
  return answer;
}

// The first token and those of plain decoding come from the target alone; so does a bonus, but after drafts.
function shown(origin, mode) {
  return origin === "prefill" || mode === "off" ? "plain" : origin;
}

// Seconds from the first token to the last, by the server's clock; null where there is nothing to measure.
export function decodeSeconds({ figures, numTokens }) {
  const seconds = figures?.first_token_seconds == null ? 0 : figures.total_seconds - figures.first_token_seconds;
  return numTokens > 1 && seconds > 0 ? seconds : null;
}

// Tokens a second after the first one.
export function speed(answer) {
  const seconds = decodeSeconds(answer);
  return seconds === null ? null : (answer.numTokens - 1) / seconds;
}

// Running averages with speculation and without, as it was asked for: all tokens of a kind over all of their seconds.
export class Speeds {
  on = { answers: 0, tokens: 0, seconds: 0 };
  off = { answers: 0, tokens: 0, seconds: 0 };

  add(answer) {
    const seconds = decodeSeconds(answer);
    if (seconds === null) return;
    const kind = answer.mode === "off" ? this.off : this.on;
    kind.answers += 1;
    kind.tokens += answer.numTokens - 1;
    kind.seconds += seconds;
  }

  // [{label, value, note}] of the kinds that were measured.
  bars() {
    const kinds = [["with speculation", this.on], ["without", this.off]];
    return kinds.filter(([, kind]) => kind.answers).map(([label, { answers, tokens, seconds }]) => ({
      label,
      value: tokens / seconds,
      note: answers === 1 ? "1 answer" : `${answers} answers`,
    }));
  }
}
