// What is shown: the timelines, which part of them is visible, and where each lane is.

/** @type {PageData} */
let data;
/** All timelines, the steps of a run among them. @type {Timeline[]} */
let known = [];
/** Those that have lanes. @type {Timeline[]} */
let timelines = [];
let longest = 1;

/** @returns {any} */
const byId = (id) => document.getElementById(id);

/**
 * An element with properties and children; `attributes` such as role are set as they are.
 * @param {string} tag
 * @param {any} properties
 * @param {(string | Node)[]} children
 * @returns {any}
 */
function make(tag, { attributes = {}, ...properties } = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Index a timeline, so that lanes and cells are found without a search through all. */
function prepare(timeline) {
  const ranks = timeline.peaks.map((_, r) => r);
  const firsts = (column) => [...ranks, ranks.length].map((r) => firstAbove(column, r - 0.5));
  timeline.first = firsts(timeline.computes.rank);
  timeline.firstCollective = firsts(timeline.collectives.rank);
  timeline.firstMessage = firsts(timeline.messages.rank);
  timeline.onPath = new Set(timeline.critical.computes);
  timeline.collectivesOnPath = new Set(timeline.critical.collectives);
  timeline.numRows = largest(timeline.collectives.row) + 1;
  timeline.lastChunk = largest(timeline.computes.chunk);
  timeline.lanes = [];
  timeline.visible = [];
}

const largest = (numbers) => numbers.reduce((most, each) => Math.max(most, each), 0);

/** Give lanes to these timelines. */
function showTimelines(chosen) {
  timelines = chosen;
  longest = Math.max(...timelines.map((timeline) => timeline.makespan)) || 1;
  const longestName = Math.max(...timelines.flatMap(({ names }) => names.map((name) => name.length)));
  GUTTER = Math.max(96, 20 + 6.5 * longestName);
  show(0, longest);
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

let GUTTER = 96;
const GROUP = 12;
const RIGHT = 18, TOP = 24, HEADER = 30;
const LEAST_PITCH = 24, MOST_PITCH = 110, ALL_IN_VIEW = 100, LEAST_ROOMY = 14;

const view = { start: 0, end: 1, top: 0, rows: 1, tab: "summary" };
const shown = { critical: false, messages: true };
const LANE_TABS = ["summary", "timeline", "memory"];
const page = { width: 0, height: 0, bottom: 0, /** @type {Lane[]} */ lanes: [], headers: [] };

const laneWidth = () => Math.max(page.width - GUTTER - RIGHT, 1);
const scale = () => laneWidth() / (view.end - view.start);
const x = (time) => GUTTER + (time - view.start) * scale();
const timeAt = (px) => view.start + (px - GUTTER) / scale();

/** Give every lane its place: the timelines one below the other, the ranks of other stages apart. */
function layOut() {
  const isApart = ({ groups }, rank) => rank > 0 && groups[rank] !== groups[rank - 1];
  const gaps = total(timelines.map((timeline) => timeline.peaks.filter((_, rank) => isApart(timeline, rank)).length));
  const pitch = pitchOf(total(timelines.map(({ peaks }) => peaks.length)), GROUP * gaps);
  page.headers = [];
  page.lanes = [];
  let y = TOP;
  for (const timeline of timelines) {
    page.headers.push({ timeline, y });
    y += HEADER;
    timeline.peaks.forEach((_, rank) => {
      if (isApart(timeline, rank)) y += GROUP;
      page.lanes.push((timeline.lanes[rank] = { timeline, rank, y, pitch, ...parts(timeline, y, pitch) }));
      y += pitch;
    });
  }
  page.bottom = y + 8;
  view.top = Math.min(Math.max(view.top, 0), Math.max(page.bottom - page.height, 0));
}

/** How high each lane is. Of very many lanes all are in view, however flat, until rows are made higher. */
function pitchOf(count, gaps) {
  const room = page.height - TOP - timelines.length * HEADER - gaps - 8;
  const least = count > ALL_IN_VIEW ? 0.25 : LEAST_PITCH;
  return Math.min(Math.min(Math.max(room / count, least), MOST_PITCH) * view.rows, 3 * MOST_PITCH);
}

/** Where, in a lane of that pitch, its boxes end, and its collectives and its curve are. */
function parts(timeline, y, pitch) {
  if (pitch < LEAST_ROOMY) return { box: pitch > 4 ? pitch - 1.5 : pitch, curveY: y + pitch, curve: 0 };
  if (view.tab === "memory" && timeline.memory.length)
    return { box: pitch * 0.14, curveY: y + pitch * 0.3, curve: pitch * 0.62 };
  if (!timeline.collectives.rank.length) return { box: pitch * 0.52, curveY: y + pitch * 0.56, curve: pitch * 0.28 };
  const [box, band] = [pitch * 0.44, pitch * 0.2];
  return { box, bandY: y + box + 1, band, curveY: y + pitch * 0.68, curve: pitch * 0.2 };
}

/** Make the visible range `start` .. `end`, as far as there is something to see. */
function show(start, end) {
  const length = Math.min(Math.max(end - start, longest * 1e-6), longest);
  view.start = Math.min(Math.max(start, 0), longest - length);
  view.end = view.start + length;
}

/** Scroll until the lane is in view. */
function scrollTo({ y, pitch }) {
  if (y < view.top + TOP) view.top = y - TOP - HEADER;
  else if (y + pitch > view.top + page.height) view.top = y + pitch + 8 - page.height;
  layOut();
}

// ---- facts about computes ----

/** When the rank was free before compute `i`. */
const freeAt = ({ computes, first }, i) => (i > first[computes.rank[i]] ? computes.end[i - 1] : 0);

/** The compute of `other` that does the same as compute `i` of `timeline`, if there is one. */
function counterpart(timeline, other, i) {
  if (other === timeline) return undefined;
  const key = ({ phase, stage, microbatch, segment }, k) => `${phase[k]} ${stage[k]} ${microbatch[k]} ${segment[k]}`;
  other.named ??= new Map(Array.from(other.computes.rank, (_, k) => [key(other.computes, k), k]));
  return other.named.get(key(timeline.computes, i));
}

/** The collectives of a rank that are under way somewhere between two times. */
function collectivesBetween({ collectives: { start, end }, firstCollective }, rank, from, to) {
  const found = [];
  for (let i = firstCollective[rank]; i < firstCollective[rank + 1]; i++)
    if (end[i] >= from && start[i] <= to) found.push(i);
  return found;
}

/** The same collective on all its ranks. */
function membersOf({ collectives: { last } }, i) {
  const found = [];
  last.forEach((number, k) => number === last[i] && found.push(k));
  return found;
}

const isMemory = (timeline) => view.tab === "memory" && timeline.memory.length > 0;
const curveOf = (timeline, rank) => (isMemory(timeline) ? timeline.memory : timeline.inFlight)[rank];
const highest = ({ amount }) => largest(amount);
const peakIndex = ({ amount }) => amount.indexOf(largest(amount));

/** The microbatches in flight on a rank at a time, by stage: from their forward to their last compute. */
function aliveAt({ computes: { start, end, stage, microbatch }, first }, rank, time) {
  const spans = new Map();
  for (let i = first[rank]; i < first[rank + 1]; i++) {
    if (microbatch[i] < 0) continue;
    const key = `${stage[i]} ${microbatch[i]}`;
    const [from] = spans.get(key) ?? [start[i]];
    spans.set(key, [from, end[i]]);
  }
  const alive = new Map();
  for (const [key, [from, to]] of spans) {
    const [of, number] = key.split(" ").map(Number);
    if (from <= time && time <= to) alive.set(of, [...(alive.get(of) ?? []), number]);
  }
  return alive;
}
