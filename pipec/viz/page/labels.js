// Words: how times, computes and messages are told, and what the card says of each.

/** The factor and the name of the unit that suits times of this size. @returns {[number, string]} */
function unitOf(time) {
  if (data.unit !== "s") return [1, data.unit];
  /** @type {[number, string][]} */
  const units = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]];
  return units.find(([factor]) => time >= factor) || [1e-9, "ns"];
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

/** `11.8 MB`: decimal units, as in plans. */
function bytes(amount) {
  const power = Math.min(Math.floor(Math.log10(Math.max(amount, 1)) / 3), 4);
  return `${+(amount / 1000 ** power).toPrecision(3)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

const percent = (share) => `${(100 * share).toFixed(1)}%`;

/** `20 times as long`, `12% longer`, `40% less`: what a ratio of times is called. */
function ratioWords(ratio) {
  if (ratio >= 2) return `${+ratio.toPrecision(2)} times as long`;
  if (ratio <= 0.5) return `only ${+(100 * ratio).toPrecision(2)}% as long`;
  return `${+Math.abs(100 * (ratio - 1)).toPrecision(2)}% ${ratio > 1 ? "longer" : "shorter"}`;
}

/** `measured takes 12% longer than planned` */
function comparedWords(one, other) {
  const ratio = other.makespan / one.makespan;
  if (Math.abs(ratio - 1) < 1e-3) return `${other.name} takes as long as ${one.name}`;
  return `${other.name} takes ${ratioWords(ratio)}${ratio < 2 && ratio > 0.5 ? " than" : " as"} ${one.name}`;
}

const computeName = ({ computes }, i) =>
  data.phases[computes.phase[i]].name +
  (computes.microbatch[i] < 0 ? "" : ` of microbatch ${computes.microbatch[i]}`) +
  (computes.segment[i] < 0 ? "" : `, segment ${computes.segment[i]}`) +
  versionWords(computes, i);

/** `, reads version 3 of the weights`, where steps follow each other without a flush. */
const versionWords = ({ phase, version }, i) =>
  version[i] < 0
    ? ""
    : `, ${data.phases[phase[i]].letter === "U" ? "makes" : "reads"} version ${version[i]} of the weights`;

const collectiveName = ({ collectives }, i) => data.ops[collectives.op[i]].name;

const payloadName = ({ messages }, i) =>
  data.payloads[messages.payload[i]] +
  (messages.microbatch[i] < 0 ? "" : ` of microbatch ${messages.microbatch[i]}`);

/** `F3`, or `Fb3` for the second stage of its rank; `F3v1` if it reads version 1 of the weights. */
const boxLabel = ({ computes, lastChunk }, i) =>
  data.phases[computes.phase[i]].letter +
  (lastChunk ? String.fromCharCode(97 + (computes.chunk[i] % 26)) : "") +
  (computes.microbatch[i] < 0 ? "" : computes.microbatch[i]) +
  (computes.segment[i] < 0 ? "" : `.${computes.segment[i]}`) +
  (computes.version[i] < 0 || data.phases[computes.phase[i]].letter === "U" ? "" : `v${computes.version[i]}`);

/** `Σ2`: the sum of bucket 2. `H3`: microbatch 3 goes to the host. `J3.1`: what microbatch 3 gathers as model_collective 1. */
const collectiveLabel = ({ collectives: { op, bucket, microbatch, model_collective } }, i) =>
  data.ops[op[i]].letter +
  (data.ops[op[i]].copies ? microbatch[i] : bucket[i] < 0 ? "" : bucket[i]) +
  (model_collective[i] < 0 ? "" : `${microbatch[i]}.${model_collective[i]}`);

const spanWords = ({ start, end }, i) => `${range(start[i], end[i])}, took ${duration(end[i] - start[i])}`;

const journeyWords = ({ start, end }, i) => `sent at ${clock(start[i])}, there at ${clock(end[i])}`;

function waitWords(timeline, i) {
  const { computes, messages } = timeline;
  const idle = computes.start[i] - freeAt(timeline, i);
  if (idle <= longest * 1e-6) return "the rank did not wait before it";
  if (hostBefore(timeline, i) >= idle * 0.999) return hostWords(timeline);
  if (computes.collective[i] >= 0)
    return `the rank waited ${duration(idle)} for the ${comingWords(timeline, computes.collective[i])}`;
  const m = computes.cause[i];
  if (m < 0) return `the rank was idle for ${duration(idle)} before it, with its inputs there`;
  const sender = `rank ${timeline.numbers[messages.rank[m]]}, stage ${messages.source[m]}`;
  return `the rank waited ${duration(idle)} for the ${payloadName(timeline, m)} ` +
    `from ${sender}: ${journeyWords(messages, m)}`;
}

/** How much of the wait before compute `i` passes on the host, before the first instruction. */
const hostBefore = (timeline, i) =>
  Math.max(Math.min(timeline.host, timeline.computes.start[i]) - freeAt(timeline, i), 0);

const hostWords = ({ host }) =>
  `the plan counts ${duration(host)} on the host before the first instruction: arguments are checked and compared`;

/** Which rank came to a collective last, unless it was this one or came with it. */
function lastWords({ numbers, collectives: { rank, start, came, last } }, i) {
  const j = last[i];
  if (i === j || (start[i] === start[j] && came[i] === came[j])) return "no rank came later";
  return `rank ${numbers[rank[j]]} came last, at ${clock(start[j])}`;
}

const isCopy = ({ collectives }, i) => data.ops[collectives.op[i]].copies;

const comingWords = (timeline, i) =>
  collectiveName(timeline, i) + (isCopy(timeline, i) ? "" : `, to which ${lastWords(timeline, i)}`);

/** How the same compute fared in another timeline. */
function comparison(timeline, other, i) {
  const j = counterpart(timeline, other, i);
  if (j === undefined) return [];
  const length = ({ computes: { start, end } }, k) => end[k] - start[k];
  const [own, others] = [length(timeline, i), length(other, j)];
  const same = !own || !others || Math.abs(own / others - 1) < 1e-3;
  return [`${other.name}: ${spanWords(other.computes, j)}${same ? "" : `; this one takes ${ratioWords(own / others)}`}`];
}

/** `0 to 20 of 37 units` */
function rangeWords() {
  const few = timelines.every(({ allMessages }) => allMessages) ? "" : "; of messages, those that a rank waits for";
  const hint = shown.messages && view.tab !== "memory" && timelines.some(isBlurred) ? "; zoom in for messages" : few;
  return `${range(view.start, view.end)} of ${duration(longest)}${hint}`;
}

/** The lines of the card for what is under the pointer: a headline, where it is, and what to know of it. */
function cardLines(what) {
  const among = timelines.length > 1 ? `, ${what.timeline.name}` : "";
  const [headline, where, ...rest] = tellers[what.kind](what);
  return [headline, `${where}${among}`, ...rest];
}

/** `rank 3`, or `rank 3, replica 1 of 2` */
const placeWords = ({ numbers, replicas }, rank) =>
  `rank ${numbers[rank]}` + (replicas[rank] ? `, replica ${replicas[rank]}` : "");

/** What a rank does that has nothing left to compute. */
function leftWords(timeline, rank, time) {
  const [under] = collectivesBetween(timeline, rank, time, time);
  return under === undefined ? "nothing is left to compute" : `in the ${comingWords(timeline, under)}`;
}

const tellers = {
  compute({ timeline, rank, index }) {
    const { computes } = timeline;
    return [
      computeName(timeline, index),
      `stage ${computes.stage[index]}, ${placeWords(timeline, rank)}`,
      spanWords(computes, index),
      waitWords(timeline, index),
      ...timelines.flatMap((other) => comparison(timeline, other, index)),
    ];
  },
  idle({ timeline, rank, index, time }) {
    if (index === null) return ["idle", placeWords(timeline, rank), leftWords(timeline, rank, time)];
    const next = `the ${computeName(timeline, index)}, stage ${timeline.computes.stage[index]}`;
    return ["idle", placeWords(timeline, rank), `until ${next}`, waitWords(timeline, index)];
  },
  collective({ timeline, rank, index }) {
    const { start, end, words, told } = timeline.collectives;
    return [
      collectiveName(timeline, index),
      placeWords(timeline, rank),
      ...told[words[index]].split("\n"),
      `${range(start[index], end[index])}, took ${duration(end[index] - start[index])}`,
      ...(isCopy(timeline, index) ? [] : [lastWords(timeline, index)]),
    ];
  },
  message({ timeline, index }) {
    const { rank, peer, source, target, start, end } = timeline.messages;
    return [
      payloadName(timeline, index),
      `rank ${timeline.numbers[rank[index]]} to rank ${timeline.numbers[peer[index]]}`,
      `from stage ${source[index]} to stage ${target[index]}`,
      `${journeyWords(timeline.messages, index)}, under way for ${duration(end[index] - start[index])}`,
    ];
  },
  curve({ timeline, rank, index, time }) {
    const curve = curveOf(timeline, rank);
    if (isMemory(timeline)) return memoryWords(timeline, rank, curve, index, time);
    const most = `at ${clock(time)}; at most ${highest(curve)} in flight`;
    return [`${curve.amount[index]} in flight`, `rank ${timeline.numbers[rank]}`, most];
  },
  lane({ timeline, rank }) {
    const sums = sumsOf(timeline)[rank];
    const parts = partsOf(sums).filter(([, time]) => time > longest * 1e-4);
    return [
      timeline.names[rank],
      `${percent(idleOf(sums) / timeline.makespan)} idle`,
      ...parts.map(([name, time]) => `${name}: ${duration(time)}, ${percent(time / timeline.makespan)}`),
      ...waitingWords(timeline, sums),
    ];
  },
};

/** What is in memory: the total, each kind, and the microbatches that are alive then. */
function memoryWords(timeline, rank, curve, index, time) {
  const kinds = Object.entries(curve.kinds).map(([name, amounts]) => [name, amounts[index]]);
  const listed = kinds.filter(([, held]) => held > 0).sort((one, other) => other[1] - one[1]);
  const alive = [...aliveAt(timeline, rank, time)].map(([stage, numbers]) => `stage ${stage}: ${numbers.join(", ")}`);
  return [
    bytes(curve.amount[index]),
    `rank ${timeline.numbers[rank]}, at ${clock(time)}`,
    ...listed.map(([name, held]) => `${name.replace("_", " ")}: ${bytes(held)}`),
    ...(curve.host ? [`offloaded, in host memory besides: ${bytes(curve.host[index])} of at most ${bytes(largest(curve.host))}`] : []),
    ...(alive.length ? [`microbatches in flight, ${alive.join("; ")}`] : []),
    `peak: ${bytes(highest(curve))} at ${clock(curve.time[peakIndex(curve)])}`,
    ...(data.limits[rank] ? [`limit: ${bytes(data.limits[rank])}`] : []),
  ];
}

/** For whom a rank waits, longest first. */
const waitingWords = ({ numbers }, { waiting }) =>
  [...waiting].sort((one, other) => other[1] - one[1]).slice(0, 3)
    .map(([rank, time]) => `waits ${duration(time)} for rank ${numbers[rank]}`);
