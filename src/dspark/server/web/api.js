// The server's endpoints. Addresses are relative, so that the page also works behind a path of a proxy.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Api {
  key = ""; // kept here alone: never stored

  async get(path) {
    return (await this.#send(path, {})).json();
  }

  // The events of a GET, parsed. The address must give server-sent events.
  async *watch(path, signal) {
    yield* events(await this.#send(path, { signal }));
  }

  // The events of a POST, parsed, until the server says that it is done.
  async *ask(path, body, signal) {
    const headers = { "content-type": "application/json" };
    yield* events(await this.#send(path, { method: "POST", headers, body: JSON.stringify(body), signal }));
  }

  async #send(path, options) {
    const headers = { ...options.headers, ...(this.key ? { authorization: `Bearer ${this.key}` } : {}) };
    const answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
    if (answer.ok) return answer;
    throw new ApiError(answer.status, messageOf(await answer.text()) ?? `the server answered ${answer.status}`);
  }
}

// One object for each event; throws ApiError for an event named "error".
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split("\n");
        const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (!data.length) continue;
        const text = data.join("\n");
        if (lines.includes("event: error")) throw new ApiError(0, messageOf(text) ?? text);
        if (text !== "[DONE]") yield JSON.parse(text);
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // tells the server that nobody reads on
  }
}

function messageOf(text) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return null;
  }
}
