// What is shown: the timelines, which part of them is visible, where each lane is, and the words for it all.

const data = JSON.parse(document.getElementById("data").textContent);
const timelines = data.timelines;
const longest = Math.max(...timelines.map((timeline) => timeline.makespan)) || 1;

for (const timeline of timelines) {
  const { rank, phase, stage, chunk, microbatch } = timeline.computes;
  const ranks = timeline.peaks.map((_, r) => r);
  timeline.first = [...ranks, ranks.length].map((r) => firstAbove(rank, r - 0.5)); // compute of each rank
  timeline.named = new Map(rank.map((_, i) => [`${phase[i]} ${stage[i]} ${microbatch[i]}`, i]));
  timeline.onPath = new Set(timeline.critical.computes);
  timeline.lastChunk = Math.max(0, ...new Set(chunk));
}

/** The index of the first of ascending `values` that exceeds `value`, in `from` .. `to`. */
function firstAbove(values, value, from = 0, to = values.length) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (values[middle] > value) to = middle;
    else from = middle + 1;
  }
  return from;
}

// ---- what is visible, and where ----

const GUTTER = 96, RIGHT = 18, STRIP = 30, AXIS = 24, TOP = STRIP + AXIS, HEADER = 30;
const LEAST_PITCH = 24, MOST_PITCH = 110;

const view = { start: 0, end: longest, top: 0 };
const shown = { critical: false, messages: true, byRank: false, memory: false };
const page = { width: 0, height: 0, bottom: 0, lanes: [], headers: [] };

const laneWidth = () => Math.max(page.width - GUTTER - RIGHT, 1);
const scale = () => laneWidth() / (view.end - view.start);
const x = (time) => GUTTER + (time - view.start) * scale();
const timeAt = (px) => view.start + (px - GUTTER) / scale();

/** Give every lane its place: the timelines one below the other, or the lanes of each rank together. */
function layOut() {
  const order = timelines.flatMap((timeline) => timeline.peaks.map((_, rank) => ({ timeline, rank })));
  if (shown.byRank) order.sort((one, other) => one.rank - other.rank);
  const room = page.height - TOP - timelines.length * HEADER - 8;
  const pitch = Math.min(Math.max(room / order.length, LEAST_PITCH), MOST_PITCH);
  let y = TOP;
  const addHeader = (timeline) => {
    page.headers.push({ timeline, y });
    timeline.lanes = [];
    y += HEADER;
  };
  page.headers = [];
  page.lanes = [];
  if (shown.byRank) timelines.forEach(addHeader);
  for (const { timeline, rank } of order) {
    if (!shown.byRank && rank === 0) addHeader(timeline);
    const lane = { timeline, rank, y, box: pitch * 0.52, curveY: y + pitch * 0.56, curve: pitch * 0.28 };
    page.lanes.push(lane);
    timeline.lanes[rank] = lane;
    y += pitch;
  }
  page.bottom = y + 8;
  view.top = Math.min(Math.max(view.top, 0), Math.max(page.bottom - page.height, 0));
}

/** Make the visible range `start` .. `end`, as far as there is something to see. */
function show(start, end) {
  const length = Math.min(Math.max(end - start, longest * 1e-5), longest);
  view.start = Math.min(Math.max(start, 0), longest - length);
  view.end = view.start + length;
}

// ---- facts about computes ----

/** When the rank was free before compute `i`. */
const freeAt = ({ computes, first }, i) => (i > first[computes.rank[i]] ? computes.end[i - 1] : 0);

/** The compute of `other` that does the same as compute `i` of `timeline`, if there is one. */
function counterpart(timeline, other, i) {
  const { phase, stage, microbatch } = timeline.computes;
  return other === timeline ? undefined : other.named.get(`${phase[i]} ${stage[i]} ${microbatch[i]}`);
}

const isMemory = (timeline) => shown.memory && "memory" in timeline.curves;
const curveOf = (timeline, rank) => timeline.curves[isMemory(timeline) ? "memory" : "inFlight"][rank];
const highest = ({ amount }) => amount.reduce((most, each) => Math.max(most, each), 0);

// ---- words ----

/** The factor and the name of the unit that suits times of this size. */
function unitOf(time) {
  if (data.unit !== "s") return [1, data.unit];
  return [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]].find(([factor]) => time >= factor) || [1e-9, "ns"];
}

function inUnits(time, digits, [factor, unit]) {
  return `${+(time / factor).toPrecision(digits)} ${unit}`;
}

const duration = (time) => inUnits(time, 4, unitOf(time));

/** A point in time, in the unit of the axis, with enough digits to tell apart two that are visible. */
function clock(time) {
  const zoomed = longest / (view.end - view.start);
  return inUnits(time, 4 + Math.floor(Math.log10(zoomed)), unitOf(view.end));
}

/** `3 to 4.5 ms` */
function range(start, end) {
  const [from, to] = [clock(start), clock(end)];
  return `${from.slice(0, from.indexOf(" "))} to ${to}`;
}

function bytes(amount) {
  const power = Math.min(Math.floor(Math.log2(Math.max(amount, 1)) / 10), 4);
  return `${+(amount / 1024 ** power).toPrecision(3)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

const computeName = ({ computes }, i) =>
  `${data.phases[computes.phase[i]].name} of microbatch ${computes.microbatch[i]}`;

const payloadName = ({ messages }, i) =>
  data.payloads[messages.payload[i]] +
  (messages.microbatch[i] < 0 ? "" : ` of microbatch ${messages.microbatch[i]}`);

/** `F3`, or `Fb3` for the second stage of its rank. */
const boxLabel = ({ computes, lastChunk }, i) =>
  data.phases[computes.phase[i]].letter +
  (lastChunk ? String.fromCharCode(97 + (computes.chunk[i] % 26)) : "") +
  computes.microbatch[i];

const spanWords = ({ start, end }, i) => `${range(start[i], end[i])}, took ${duration(end[i] - start[i])}`;

const journeyWords = ({ start, end }, i) => `sent at ${clock(start[i])}, there at ${clock(end[i])}`;

function waitWords(timeline, i) {
  const { computes, messages } = timeline;
  const idle = computes.start[i] - freeAt(timeline, i);
  if (idle <= longest * 1e-6) return "the rank did not wait before it";
  const m = computes.cause[i];
  if (m < 0) return `the rank was idle for ${duration(idle)} before it, and waited for no message`;
  const sender = `rank ${messages.rank[m]}, stage ${messages.source[m]}`;
  return `the rank waited ${duration(idle)} for the ${payloadName(timeline, m)} ` +
    `from ${sender}: ${journeyWords(messages, m)}`;
}

/** How the same compute fared in another timeline. */
function comparison(timeline, other, i) {
  const j = counterpart(timeline, other, i);
  if (j === undefined) return [];
  const [here, there] = [[timeline, i], [other, j]].map(([{ computes }, k]) => computes.end[k] - computes.start[k]);
  const percent = here ? 100 * (there / here - 1) : 0;
  const change = Math.abs(percent) < 0.1 ? "" : ` (${percent > 0 ? "+" : "−"}${+Math.abs(percent).toPrecision(2)}%)`;
  return [`${other.name}: ${spanWords(other.computes, j)}${change}`];
}

/** The lines of the card for what is under the pointer: a headline, where it is, what is to be known of it. */
function cardLines({ kind, timeline, index, rank, time }) {
  const { computes, messages } = timeline;
  const among = timelines.length > 1 ? `, ${timeline.name}` : "";
  switch (kind) {
    case "compute":
      return [
        computeName(timeline, index), `stage ${computes.stage[index]}, rank ${rank}${among}`,
        spanWords(computes, index), waitWords(timeline, index),
        ...timelines.flatMap((other) => comparison(timeline, other, index)),
      ];
    case "message":
      return [
        payloadName(timeline, index), `rank ${messages.rank[index]} to rank ${messages.peer[index]}${among}`,
        `from stage ${messages.source[index]} to stage ${messages.target[index]}`,
        `${journeyWords(messages, index)}, under way for ${duration(messages.end[index] - messages.start[index])}`,
      ];
    case "curve": {
      const { amount } = curveOf(timeline, rank);
      const words = (held) => (isMemory(timeline) ? bytes(held) : `${held} in flight`);
      return [words(amount[index]), `rank ${rank}${among}`, `at ${clock(time)}; at most ${words(highest({ amount }))}`];
    }
    case "idle":
      return ["idle", `rank ${rank}${among}`, ...(index === null ? ["nothing is left to compute"]
        : [`until the ${computeName(timeline, index)}, stage ${computes.stage[index]}`, waitWords(timeline, index)])];
  }
}
