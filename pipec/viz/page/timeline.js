// What is shown: the timelines, which part of them is visible, and where each lane is.

const data = JSON.parse(document.getElementById("data").textContent);
const timelines = data.timelines;
const longest = Math.max(...timelines.map((timeline) => timeline.makespan)) || 1;

for (const timeline of timelines) {
  const { rank, phase, stage, chunk, microbatch, segment } = timeline.computes;
  const ranks = timeline.peaks.map((_, r) => r);
  timeline.first = [...ranks, ranks.length].map((r) => firstAbove(rank, r - 0.5)); // compute of each rank
  timeline.named = new Map(rank.map((_, i) => [`${phase[i]} ${stage[i]} ${microbatch[i]} ${segment[i]}`, i]));
  timeline.onPath = new Set(timeline.critical.computes);
  timeline.firstCollective = [...ranks, ranks.length].map((r) => firstAbove(timeline.collectives.rank, r - 0.5));
  timeline.numRows = Math.max(0, ...new Set(timeline.collectives.row)) + 1;
  timeline.collectivesOnPath = new Set(timeline.critical.collectives);
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

const longestName = Math.max(...timelines.flatMap(({ names }) => names.map((name) => name.length)));
const GUTTER = Math.max(96, 20 + 6.5 * longestName), GROUP = 12;
const RIGHT = 18, STRIP = 30, AXIS = 24, TOP = STRIP + AXIS, HEADER = 30;
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
  const isApart = ({ timeline: { groups }, rank }) => rank > 0 && groups[rank] !== groups[rank - 1];
  if (shown.byRank) order.sort((one, other) => one.rank - other.rank);
  const gaps = GROUP * order.filter(isApart).length;
  const room = page.height - TOP - timelines.length * HEADER - gaps - 8;
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
    if (isApart({ timeline, rank })) y += GROUP;
    const lane = { timeline, rank, y, ...parts(timeline, y, pitch) };
    page.lanes.push(lane);
    timeline.lanes[rank] = lane;
    y += pitch;
  }
  page.bottom = y + 8;
  view.top = Math.min(Math.max(view.top, 0), Math.max(page.bottom - page.height, 0));
}

/** Where, in a lane of that pitch, its boxes end, and its collectives and its curve are. */
function parts(timeline, y, pitch) {
  if (!timeline.collectives.rank.length) return { box: pitch * 0.52, curveY: y + pitch * 0.56, curve: pitch * 0.28 };
  const [box, band] = [pitch * 0.44, pitch * 0.2];
  return { box, bandY: y + box + 1, band, curveY: y + pitch * 0.68, curve: pitch * 0.2 };
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
  const { phase, stage, microbatch, segment } = timeline.computes;
  return other === timeline ? undefined : other.named.get(`${phase[i]} ${stage[i]} ${microbatch[i]} ${segment[i]}`);
}

/** The collectives of a rank that are under way somewhere between two times. */
function collectivesBetween({ collectives: { start, end }, firstCollective }, rank, from, to) {
  const found = [];
  for (let i = firstCollective[rank]; i < firstCollective[rank + 1]; i++)
    if (end[i] >= from && start[i] <= to) found.push(i);
  return found;
}

/** The same collective on all its ranks. */
const membersOf = ({ collectives: { last } }, i) =>
  last.flatMap((number, k) => (number === last[i] ? [k] : []));

const isMemory = (timeline) => shown.memory && "memory" in timeline.curves;
const curveOf = (timeline, rank) => timeline.curves[isMemory(timeline) ? "memory" : "inFlight"][rank];
const highest = ({ amount }) => amount.reduce((most, each) => Math.max(most, each), 0);
