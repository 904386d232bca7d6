// Small charts as SVG. Each has its numbers in words for those who do not see it.

const SPACE = "http://www.w3.org/2000/svg";
const WIDTH = 340;
const CELL = 10; // of the strip
const COLUMN = 14;
const FEW = 20; // drafts: a bin with fewer is drawn hollow

export function el(name, attributes = {}, ...children) {
  const node = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const text = (x, y, words, more = {}) => el("text", { x, y, ...more }, words);
const line = (x1, y1, x2, y2, kind) => el("line", { x1, y1, x2, y2, class: kind });
const percent = (share) => `${Math.round(100 * share)} %`;
const titled = (node, words) => {
  node.append(el("title", {}, words));
  return node;
};

function chart(place, label, height, parts) {
  place.replaceChildren(el("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label }, ...parts));
}

function nothing(place, words) {
  const p = document.createElement("p");
  p.textContent = words;
  place.replaceChildren(p);
}

// Lines and words at 0, 50 and 100 %.
function shares(left, top, bottom) {
  return [0, 0.5, 1].flatMap((share) => {
    const y = bottom - share * (bottom - top);
    const kind = share ? "rule" : "axis";
    return [line(left, y, WIDTH, y, kind), text(left - 6, y + 4, percent(share), { "text-anchor": "end" })];
  });
}

// One column a round: from below, the bonus, then the drafts in their order. Returns how many rounds fit.
export function strip(svg, rounds, words) {
  const fit = Math.max(1, Math.floor(svg.clientWidth / COLUMN));
  const seen = rounds.slice(-fit);
  const tallest = Math.max(4, ...seen.map((round) => round.drafted));
  const height = (tallest + 1) * CELL + 4;
  svg.setAttribute("height", height);
  const columns = seen.map((round, i) => {
    const x = i * COLUMN;
    const cell = (level, kind) => el("rect", {
      x: x + 0.75, y: height - (level + 1) * CELL - (level ? 3 : 0), width: COLUMN - 4, height: CELL - 3, rx: 1, class: kind,
    });
    const column = el("g", {}, ...(round.bonus ? [cell(0, "bonus")] : []));
    for (let draft = 0; draft < round.drafted; draft += 1) {
      const judged = draft < round.verified ? "rejected" : "unverified";
      column.append(cell(draft + 1, draft < round.accepted ? "accepted" : judged));
    }
    return titled(column, told(round));
  });
  svg.replaceChildren(line(0, height - CELL - 0.5, svg.clientWidth, height - CELL - 0.5), ...columns);
  words(fit);
}

export function told({ drafted, verified, accepted, bonus }) {
  return `drafted ${drafted}, verified ${verified}, accepted ${accepted}, bonus ${Number(bonus)}`;
}

export function positions(place, found) {
  if (!found.length) return nothing(place, "No drafts verified yet.");
  const [left, top, bottom] = [40, 8, 112];
  const step = (WIDTH - left) / found.length;
  const wide = Math.min(step - 6, 34);
  const bars = found.flatMap(({ judged, kept }, i) => {
    const middle = left + (i + 0.5) * step;
    const tall = (kept / judged) * (bottom - top);
    const bar = el("rect", { x: middle - wide / 2, y: bottom - tall, width: wide, height: tall, rx: 2, class: "bar" });
    return [
      titled(bar, `draft ${i + 1}: ${kept} of ${judged}`),
      ...(step > 30 ? [text(middle, Math.max(bottom - tall - 4, top + 4), Math.round((100 * kept) / judged), { "text-anchor": "middle", class: "value" })] : []),
      text(middle, bottom + 15, i + 1, { "text-anchor": "middle" }),
    ];
  });
  const numbers = found.map(({ judged, kept }, i) => `draft ${i + 1} ${percent(kept / judged)}`).join(", ");
  return chart(place, `Drafts accepted by position: ${numbers}`, 132, [...shares(left, top, bottom), ...bars]);
}

export function reliability(place, bins) {
  if (!bins.length) return nothing(place, "No confidences yet. A drafter without a confidence head gives none.");
  const [left, top, bottom] = [40, 8, 150];
  const x = (share) => left + 6 + share * (WIDTH - left - 16);
  const y = (share) => bottom - share * (bottom - top);
  const path = bins.filter((bin) => bin.count >= FEW).map((bin) => `${x(bin.confidence)},${y(bin.kept)}`).join(" ");
  const most = Math.max(...bins.map((bin) => bin.count));
  const dots = bins.map(({ count, confidence, kept }) => {
    const r = 3 + 4 * Math.sqrt(count / most);
    const dot = el("circle", { cx: x(confidence), cy: y(kept), r, class: count < FEW ? "dot few" : "dot" });
    return titled(dot, `confidence ${percent(confidence)}: ${percent(kept)} of ${count} accepted`);
  });
  const ticks = [0, 0.5, 1].map((share) => text(x(share), bottom + 17, percent(share), { "text-anchor": share === 1 ? "end" : "middle" }));
  const numbers = bins.map(({ confidence, kept, count }) => `${percent(confidence)} came to ${percent(kept)} of ${count}`);
  return chart(place, `Accepted drafts by confidence: ${numbers.join(", ")}`, 186, [
    ...shares(left, top, bottom),
    line(x(0), y(0), x(1), y(1), "ideal"),
    el("polyline", { points: path, class: "join" }),
    ...dots,
    ...ticks,
    text(WIDTH, bottom + 33, "confidence (across), accepted (up)", { "text-anchor": "end" }),
  ]);
}

export function budgets(place, found) {
  if (!found.length) return nothing(place, "No step yet.");
  const [left, top, bottom] = [40, 12, 112];
  const most = Math.max(1, ...found.map((at) => at.high));
  const widest = Math.max(4, ...found.map((at) => at.running));
  const x = (running) => left + ((running - 0.5) * (WIDTH - left)) / widest;
  const y = (budget) => bottom - (budget / most) * (bottom - top);
  const dots = found.flatMap(({ running, steps, mean, low, high }) => [
    ...(high > low ? [line(x(running), y(low), x(running), y(high), "whisker")] : []),
    titled(el("circle", { cx: x(running), cy: y(mean), r: 4, class: "dot" }), `${running} running: ${mean.toFixed(1)} drafts a step, ${low} to ${high}, ${steps} steps`),
  ]);
  const path = found.map((at) => `${x(at.running)},${y(at.mean)}`).join(" ");
  const every = Math.ceil(widest / 12);
  const ticks = Array.from({ length: widest }, (_, i) => i + 1).filter((n) => n % every === 0)
    .map((n) => text(x(n), bottom + 15, n, { "text-anchor": "middle" }));
  const numbers = found.map(({ running, mean }) => `${running} running: ${mean.toFixed(1)}`).join(", ");
  return chart(place, `Drafts verified a step by running requests: ${numbers}`, 146, [
    line(left, top, WIDTH, top, "rule"), line(left, bottom, WIDTH, bottom, "axis"),
    text(left - 6, top + 4, most, { "text-anchor": "end" }), text(left - 6, bottom + 4, 0, { "text-anchor": "end" }),
    el("polyline", { points: path, class: "join" }), ...dots, ...ticks,
    text(WIDTH, bottom + 31, "running requests (across)", { "text-anchor": "end" }),
  ]);
}

// Bars of tokens a second: [{label, value, note}], the first of two compared with the second.
export function speeds(place, bars, hint) {
  if (!bars.length) return nothing(place, hint);
  const most = Math.max(...bars.map((bar) => bar.value));
  const parts = bars.flatMap(({ label, value, note }, i) => {
    const y = 38 * i;
    return [
      text(0, y + 11, label, { class: "value" }),
      text(WIDTH, y + 11, `${value.toFixed(1)} tok/s · ${note}`, { "text-anchor": "end" }),
      el("rect", { x: 0, y: y + 17, width: (value / most) * WIDTH, height: 9, rx: 2, class: i ? "bar second" : "bar" }),
    ];
  });
  const ratio = bars.length === 2 ? `${(bars[0].value / bars[1].value).toFixed(2)}× the speed without speculation` : "";
  if (ratio) parts.push(text(0, 38 * bars.length + 10, ratio, { class: "value" }));
  const label = bars.map(({ label: name, value }) => `${name} ${value.toFixed(1)} tokens a second`);
  return chart(place, [...label, ratio].filter(Boolean).join(", "), 38 * bars.length + (ratio ? 16 : -6), parts);
}
