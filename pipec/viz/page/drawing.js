// Drawing: the visible part of the lanes on a canvas, in the colours of the style sheet.

const LEAST_WIDTH = 3; // pixels below which boxes are drawn together with their neighbours
const MOST_ARROWS = 4000;
const MOST_CELLS_MOVING = 200000; // of more, not all lanes are drawn while the view moves
const FONT = getComputedStyle(document.body).fontFamily;
const LEAST_HEIGHT = 1; // pixels below which lanes are left out, so that one in so many is drawn

const canvas = byId("canvas");
const ctx = canvas.getContext("2d");
const overlay = byId("overlay").getContext("2d"); // what follows the pointer
let colors = {};
/** While a range is picked, from where to where in pixels. @type {[number, number]} */
let selection = null;
/** The range that was picked, from when to when. @type {[number, number]} */
let picked = null;
let isMoving = false; // while the wheel turns or a drag goes on
/** What is under the pointer. @type {Thing} */
let hovered = null;
/** What was clicked or found. @type {Thing} */
let selected = null;
/** Of a search: what a compute and a message must be. @type {ReturnType<typeof parseQuery>} */
let matches = null;

function readColors() {
  const style = getComputedStyle(document.documentElement);
  const surfaces = ["page", "lane", "line", "edge", "text", "muted", "ink", "curve", "critical", "focus"];
  const happening = [...data.phases, ...data.ops].map(({ key }) => key);
  const kinds = known.flatMap(({ memory }) => memory.flatMap((curve) => Object.keys(curve.kinds ?? {})));
  const names = [...surfaces, "activation", "gradient", "other", "waiting", "corner", "idle", ...happening, ...[...kinds, "offloaded"].map((kind) => `memory-${kind}`)];
  colors = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  for (const timeline of known)
    timeline.fills = data.phases.map(({ key }) => shades(colors[key], timeline.lastChunk + 1));
}

/** `color`, such as #8cb8f2, and lighter ones for the later stages of a rank. */
function shades(color, count) {
  const channels = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  const mixed = (white) => channels.map((channel) => Math.round(channel + (255 - channel) * white));
  return Array.from({ length: count }, (_, k) => `rgb(${mixed((0.5 * k) / Math.max(count - 1, 1))})`);
}

const payloadColor = (payload) => colors[data.payloads[payload]] || colors.other;

function draw() {
  for (const timeline of timelines) timeline.visible = visibleMessages(timeline);
  fill(colors.page, 0, 0, page.width, page.height);
  ctx.save();
  ctx.translate(0, -view.top);
  const inView = page.lanes.filter(({ y, pitch }) => y < view.top + page.height && y + pitch > view.top + TOP);
  const lanes = every(inView);
  drawGutters(lanes);
  ctx.save();
  clipToLanes(ctx);
  drawLanes(lanes);
  ctx.restore();
  page.headers.forEach(drawHeader);
  ctx.restore();
  drawAxis();
  drawScrollbar();
}

/**
 * One in so many lanes that each has a pixel; the others would be drawn over it. While the view moves, fewer and
 * thicker ones, so that it moves smoothly.
 */
function every(lanes) {
  const { pitch } = lanes[0] ?? { pitch: 1 };
  const hurried = isMoving ? Math.ceil(total(lanes.map(countVisible)) / MOST_CELLS_MOVING) : 1;
  const stride = Math.max(Math.ceil(LEAST_HEIGHT / pitch), hurried);
  if (stride === 1) return lanes;
  const box = Math.ceil(pitch * stride);
  return lanes.filter((_, k) => k % stride === 0).map((lane) => ({ ...lane, y: Math.floor(lane.y), box }));
}

function countVisible({ timeline: { computes: { start }, first }, rank }) {
  const [begin, last] = [first[rank], first[rank + 1]];
  return firstAbove(start, view.end, begin, last) - firstAbove(start, view.start, begin, last);
}

/** The names of lanes; of flat ones as many as have room. */
function drawGutters(lanes) {
  let free = -Infinity;
  for (const lane of lanes) {
    if (lane.y < free) continue;
    drawGutter(lane);
    free = lane.y + 13;
  }
}

function clipToLanes(pen) {
  pen.beginPath();
  pen.rect(GUTTER, view.top + TOP, laneWidth(), page.height);
  pen.clip();
}

function drawLanes(lanes) {
  for (const { y, box } of lanes) fill(colors.lane, GUTTER, y, laneWidth(), box);
  for (const lane of lanes) drawHost(lane);
  for (const [time] of ticks()) fill(colors.line, Math.round(x(time)), view.top + TOP, 1, page.height);
  lanes.forEach(drawCurve);
  timelines.forEach(drawMessages);
  const brush = { place: x, from: view.start, right: GUTTER + laneWidth() };
  drawGathered(ctx, gatherBoxes(lanes, brush));
  lanes.filter(({ band }) => band).forEach(drawCollectives);
  if (shown.critical) timelines.forEach(drawCriticalMessages);
}

/** What a plan counts for the host, before the first instruction: hatched, as it is neither work nor a wait. */
function drawHost({ timeline, y, box }) {
  const right = x(timeline.host);
  if (!timeline.host || right < GUTTER + 1 || box < 4) return;
  ctx.save();
  ctx.beginPath();
  ctx.rect(x(0), y, right - x(0), box);
  ctx.clip();
  ctx.strokeStyle = colors.other;
  ctx.lineWidth = 1;
  ctx.beginPath();
  for (let px = Math.max(x(0), GUTTER - box) - box; px < Math.min(right, page.width); px += 6) {
    ctx.moveTo(px, y + box);
    ctx.lineTo(px + box, y);
  }
  ctx.stroke();
  ctx.restore();
}

function fill(color, px, py, wide, high, alpha = 1) {
  ctx.globalAlpha = alpha;
  ctx.fillStyle = color;
  ctx.fillRect(px, py, wide, high);
  ctx.globalAlpha = 1;
}

function write(words, px, py, { color = colors.muted, size = 12, align = "left", weight = 400 } = {}) {
  ctx.fillStyle = color;
  ctx.textAlign = align;
  ctx.font = `${weight} ${size}px ${FONT}`;
  ctx.fillText(words, px, py);
}

// ---- what names the lanes ----

function drawHeader({ timeline, y }) {
  fill(colors.page, 0, y, page.width, HEADER);
  write(timeline.name, 16, y + 20, { color: colors.text, weight: 600, size: 13 });
  const from = Math.max(GUTTER, 30 + ctx.measureText(timeline.name).width);
  ctx.font = `400 12px ${FONT}`;
  write(shortened(timeline.summary, page.width - from - RIGHT), from, y + 20);
}

/** As much of the words as is no wider than that. */
function shortened(words, width) {
  if (ctx.measureText(words).width <= width) return words;
  let count = words.length;
  while (count && ctx.measureText(`${words.slice(0, count)}…`).width > width) count--;
  return `${words.slice(0, count)}…`;
}

function drawGutter({ timeline, rank, y, box, curveY, curve }) {
  const roomy = box + curve > 26;
  if (isSelectedLane(timeline, rank)) fill(colors.focus, GUTTER - 4, y, 3, Math.max(box + curve, 4));
  write(timeline.names[rank], GUTTER - 10, y + (roomy ? Math.max(box / 2 + 4, 10) : Math.max(box - 2, 9)), { color: colors.text, align: "right" });
  const peak = highest(curveOf(timeline, rank));
  const below = `≤ ${isMemory(timeline) ? bytes(peak) : `${peak} in flight`}`;
  if (roomy) write(below, GUTTER - 10, curveY + curve / 2 + 4, { size: 11, align: "right" });
}

/** Round times about 110 pixels apart, with their text. */
function ticks() {
  const [factor] = unitOf(view.end);
  const least = 110 / scale() / factor;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].find((each) => each * power >= least * 0.999) * power;
  const from = Math.ceil(view.start / factor / step - 1e-9);
  const to = Math.floor(view.end / factor / step + 1e-9);
  const times = Array.from({ length: to - from + 1 }, (_, k) => (from + k) * step);
  return times.map((time) => [time * factor, String(+time.toPrecision(12))]);
}

function drawAxis() {
  fill(colors.page, 0, 0, page.width, TOP);
  write(`time, ${unitOf(view.end)[1]}`, 16, 16);
  for (const [time, words] of ticks()) write(words, x(time), 16, { align: "center" });
  fill(colors.edge, GUTTER, TOP - 1, laneWidth(), 1);
}

// ---- boxes ----

/** The boxes of the lanes by colour, for changing colours is what costs most, and their labels. */
function gatherBoxes(lanes, brush) {
  const found = { faded: new Map(), full: new Map(), labels: [] };
  for (const lane of lanes) gatherLane(lane, brush, found);
  return found;
}

/** A run of boxes too narrow to see becomes one box per phase. */
function gatherLane(lane, brush, found) {
  const { computes: { start, end }, first } = lane.timeline;
  const last = first[lane.rank + 1];
  let i = firstAbove(end, brush.from, first[lane.rank], last);
  while (i < last && brush.place(start[i]) < brush.right) {
    const left = brush.place(start[i]);
    const from = i;
    while (i < last && brush.place(start[i]) - left < LEAST_WIDTH && isNarrow(brush, start[i], end[i])) i++;
    if (i > from) gatherRun(lane, brush, found, from, i);
    else gatherBox(lane, brush, found, i++);
  }
}

const isNarrow = ({ place }, start, end) => place(end) - place(start) < LEAST_WIDTH;

const widths = new Float64Array(64); // of a phase, marked or not
const members = new Int32Array(widths.length);

function gatherRun(lane, brush, found, from, to) {
  const { timeline } = lane, { start, end, phase } = timeline.computes;
  const marks = matches ? matches.compute : shown.critical ? (each, i) => each.onPath.has(i) : () => false;
  widths.fill(0);
  for (let i = from; i < to; i++) {
    const key = 2 * phase[i] + (marks(timeline, i) ? 1 : 0);
    widths[key] += brush.place(end[i]) - brush.place(start[i]);
    members[key] = i;
  }
  let left = brush.place(start[from]);
  widths.forEach((width, key) => {
    if (width > 0) addBox(lane, found, members[key], left, width);
    left += width;
  });
}

function gatherBox(lane, brush, found, i) {
  const { start, end } = lane.timeline.computes;
  const left = brush.place(start[i]);
  const width = brush.place(end[i]) - left - 1;
  addBox(lane, found, i, left, width);
  if (lane.box >= 11) addLabel(lane, found, i, left, width);
}

const isCritical = (timeline, i) => shown.critical && !matches && timeline.onPath.has(i);
const isFaded = (timeline, i) => (matches ? !matches.compute(timeline, i) : shown.critical && !timeline.onPath.has(i));
const isSelectedLane = (timeline, rank) => selected?.timeline === timeline && selected.rank === rank;

function addBox({ timeline, y, box }, { faded, full }, i, left, width) {
  const { phase, chunk } = timeline.computes;
  addRect(isFaded(timeline, i) ? faded : full, timeline.fills[phase[i]][chunk[i]], left, y, width, box);
  const thick = Math.min(3, box / 4);
  if (isCritical(timeline, i)) addRect(full, colors.critical, left, y + box - thick, width, thick);
}

function addRect(rects, color, left, top, width, height) {
  const same = rects.get(color);
  if (same) same.push(left, top, width, height);
  else rects.set(color, [left, top, width, height]);
}

function addLabel({ timeline, y, box }, { labels }, i, left, width) {
  const from = Math.max(left, GUTTER), to = Math.min(left + width, GUTTER + laneWidth());
  const number = timeline.computes.microbatch[i];
  const texts = [boxLabel(timeline, i), number < 0 ? "" : String(number)];
  const text = texts.find((each) => each.length * 6.6 + 3 <= to - from);
  const color = isFaded(timeline, i) ? colors.muted : colors.ink;
  if (text) labels.push({ text, color, px: (from + to) / 2, py: y + box / 2 + 4 });
}

function drawGathered(pen, { faded, full, labels }) {
  const order = ([one], [other]) => Number(one === colors.critical) - Number(other === colors.critical);
  for (const [alpha, rects] of [[0.25, faded], [1, full]]) {
    pen.globalAlpha = alpha;
    for (const [color, same] of [...rects].sort(order)) {
      pen.fillStyle = color;
      for (let k = 0; k < same.length; k += 4) pen.fillRect(same[k], same[k + 1], same[k + 2], same[k + 3]);
    }
  }
  for (const { text, color, px, py } of labels) write(text, px, py, { color, size: 11, align: "center" });
}

// ---- collectives ----

/** Where a collective is drawn: [left, top, width, height]. Those of a rank that overlap share the band. */
function bandRect(timeline, i) {
  const { rank, start, end, row } = timeline.collectives;
  const { bandY, band } = timeline.lanes[rank[i]];
  const height = band / timeline.numRows;
  return [x(start[i]), bandY + row[i] * height, Math.max(x(end[i]) - x(start[i]), 1), height - 1];
}

function drawCollectives({ timeline, rank }) {
  for (const i of collectivesBetween(timeline, rank, view.start, view.end)) {
    const [left, top, width, height] = bandRect(timeline, i);
    const isOnPath = timeline.collectivesOnPath.has(i);
    fill(colors[data.ops[timeline.collectives.op[i]].key], left, top, width, height, shown.critical && !isOnPath ? 0.25 : 1);
    if (shown.critical && isOnPath) fill(colors.critical, left, top + height - 2, width, 2);
    const from = Math.max(left, GUTTER), to = Math.min(left + width, GUTTER + laneWidth());
    const text = collectiveLabel(timeline, i);
    if (height >= 10 && text.length * 6.6 + 3 <= to - from)
      write(text, (from + to) / 2, top + height / 2 + 4, { color: colors.ink, size: 10, align: "center" });
  }
}

// ---- curves ----

/** The most that any rank holds, in any timeline: curves of one kind have one scale. */
function curveTop(timeline) {
  const curves = timelines.flatMap((each) => (isMemory(timeline) ? each.memory : each.inFlight));
  const limit = isMemory(timeline) ? largest(data.limits) : 0;
  const most = Math.max(1, ...curves.map((curve) => (curve.most ??= highest(curve))));
  return limit && limit < 2 * most ? Math.max(limit, most) : most;
}

/** The most that any rank holds in host memory, in any timeline, where bytes are drawn. */
const hostTop = (timeline) =>
  isMemory(timeline) ? Math.max(0, ...timelines.flatMap(({ memory }) => memory.map((curve) => (curve.mostOnHost ??= largest(curve.host ?? []))))) : 0;

/** Where a lane has the zero of its curve, and how high one of its units is: below it is what is in host memory. */
function curveAxis({ timeline, curveY, curve: height }) {
  const top = curveTop(timeline), unit = height / (top + hostTop(timeline));
  return { bottom: curveY + unit * top, unit };
}

function drawCurve(lane) {
  const { timeline, rank, curve: height } = lane;
  if (height < 2) return;
  const curve = curveOf(timeline, rank);
  const { bottom, unit } = curveAxis(lane);
  if (isMemory(timeline)) drawMemory(lane, curve, bottom, unit);
  else fillSteps(timeline, curve, curve.amount, null, bottom, unit, colors.curve);
  fill(colors.line, GUTTER, bottom, laneWidth(), 1);
}

/** Fill the steps of a curve, on top of those `below`; of steps too narrow to see the one with the highest total. */
function fillSteps(timeline, { time, amount: total }, amount, below, bottom, unit, color) {
  const last = x(Math.min(timeline.makespan, view.end));
  const from = Math.max(firstAbove(time, view.start) - 1, 0);
  const steps = [];
  for (let i = from; i < time.length && time[i] <= view.end; ) {
    const left = Math.max(x(time[i]), GUTTER - 2);
    let best = i;
    do {
      if (total[i] > total[best]) best = i;
      i++;
    } while (i < time.length && x(time[i]) - left < 0.7);
    steps.push([left, i < time.length ? Math.min(x(time[i]), last) : last, best]);
  }
  ctx.beginPath();
  ctx.moveTo(steps.length ? steps[0][0] : GUTTER, bottom);
  for (const [left, right, i] of steps) {
    const y = bottom - unit * (amount[i] + (below ? below[i] : 0));
    ctx.lineTo(left, y);
    ctx.lineTo(right, y);
  }
  for (const [left, right, i] of steps.reverse()) {
    const y = bottom - unit * (below ? below[i] : 0);
    ctx.lineTo(right, y);
    ctx.lineTo(left, y);
  }
  ctx.fillStyle = color;
  ctx.fill();
}

/** The kinds of a curve, each with the sum of those below it. */
function stacked(curve) {
  if (curve.stack) return curve.stack;
  const below = new Float64Array(curve.time.length);
  curve.stack = Object.entries(curve.kinds).map(([kind, amounts]) => {
    const floor = below.slice();
    amounts.forEach((amount, i) => (below[i] += amount));
    return [kind, amounts, floor];
  });
  return curve.stack;
}

/** Bytes by kind, one on the other; the peak has a mark, and the limit is a line. Below are those in host memory. */
function drawMemory({ timeline, rank, curveY, curve: height }, curve, bottom, unit) {
  for (const [kind, amounts, below] of stacked(curve))
    fillSteps(timeline, curve, amounts, below, bottom, unit, colors[`memory-${kind}`] || colors.curve);
  if (curve.host) fillSteps(timeline, { ...curve, amount: curve.host }, curve.host, null, bottom, -unit, colors["memory-offloaded"]);
  const limit = data.limits[rank];
  if (limit && bottom - unit * limit >= curveY - 1) fill(colors.critical, GUTTER, bottom - unit * limit, laneWidth(), 1.5);
  const peak = peakIndex(curve), px = x(curve.time[peak]), py = bottom - unit * curve.amount[peak];
  if (height < 16) return;
  ctx.beginPath();
  ctx.moveTo(px, py);
  ctx.lineTo(px - 4, py - 6);
  ctx.lineTo(px + 4, py - 6);
  ctx.fillStyle = colors.text;
  ctx.fill();
  const isLate = px > GUTTER + laneWidth() - 110;
  if (height > 40) write(`peak ${bytes(curve.amount[peak])}`, px + (isLate ? -8 : 8), py - 1, { color: colors.text, size: 11, align: isLate ? "right" : "left" });
}

// ---- messages ----

/** The messages of microbatches on the way in the visible range; of too many to draw, one too many. */
function visibleMessages(timeline) {
  const { messages: { start, end, microbatch }, firstMessage, peaks } = timeline;
  const found = [];
  if (!shown.messages || view.tab === "memory") return found;
  timeline.longestMessage ??= start.reduce((most, begun, i) => Math.max(most, end[i] - begun), 0);
  for (let rank = 0; rank < peaks.length && found.length <= MOST_ARROWS; rank++)
    for (let i = firstAbove(start, view.start - timeline.longestMessage - 1e-12, firstMessage[rank], firstMessage[rank + 1]); i < firstMessage[rank + 1] && start[i] <= view.end; i++)
      if (microbatch[i] >= 0 && end[i] >= view.start) found.push(i);
  return found;
}

function isBlurred({ visible, lanes }) {
  return visible.length > Math.min(MOST_ARROWS, (laneWidth() * lanes.length) / 12);
}

/** Those to draw: none where arrows would only blur the picture. */
function arrows(timeline) {
  if (!shown.messages || view.tab === "memory" || isBlurred(timeline) || (timeline.lanes[0]?.pitch ?? 0) < LEAST_ROOMY) return [];
  return matches ? timeline.visible.filter((i) => matches.message(timeline, i)) : timeline.visible;
}

/** Where an arrow begins and ends; activations and gradients that meet are drawn side by side. */
function arrowEnds(timeline, i) {
  const { rank, peer, start, end, payload } = timeline.messages;
  const source = timeline.lanes[rank[i]], target = timeline.lanes[peer[i]];
  const down = source.y < target.y;
  const aside = data.payloads[payload[i]] === "gradient" ? 2 : -2;
  return [
    x(start[i]) + aside, down ? source.y + source.box : source.y,
    x(end[i]) + aside, down ? target.y : target.y + target.box,
  ];
}

function drawMessages(timeline) {
  const drawn = arrows(timeline);
  ctx.globalAlpha = shown.critical ? 0.25 : 0.75;
  data.payloads.forEach((_, payload) => {
    const same = drawn.filter((i) => timeline.messages.payload[i] === payload);
    if (same.length) strokeMessages(ctx, timeline, same, payloadColor(payload), 1);
  });
  ctx.globalAlpha = 1;
}

function drawCriticalMessages(timeline) {
  strokeMessages(ctx, timeline, timeline.critical.messages, colors.critical, 2);
}

function strokeMessages(pen, timeline, indices, color, thickness) {
  const lines = new Path2D(), heads = new Path2D(), size = 4 + thickness;
  for (const i of indices) {
    const [fromX, fromY, toX, toY] = arrowEnds(timeline, i);
    const angle = Math.atan2(toY - fromY, toX - fromX);
    lines.moveTo(fromX, fromY);
    lines.lineTo(toX, toY);
    heads.moveTo(toX, toY);
    for (const turn of [-0.45, 0.45])
      heads.lineTo(toX - size * Math.cos(angle + turn), toY - size * Math.sin(angle + turn));
  }
  pen.strokeStyle = pen.fillStyle = color;
  pen.lineWidth = thickness;
  pen.stroke(lines);
  pen.fill(heads);
}

// ---- what follows the pointer ----

function drawOverlay() {
  overlay.clearRect(0, 0, page.width, page.height);
  overlay.save();
  overlay.translate(0, -view.top);
  clipToLanes(overlay);
  if (hovered) drawHovered(hovered);
  if (selected) drawSelected(selected);
  overlay.restore();
  const band = selection ?? picked?.map(x);
  if (!band) return;
  overlay.globalAlpha = 0.2;
  overlay.fillStyle = colors.focus;
  const [left, right] = [Math.max(Math.min(...band), GUTTER), Math.min(Math.max(...band), GUTTER + laneWidth())];
  if (right > left) overlay.fillRect(left, 0, right - left, page.height);
  overlay.globalAlpha = 1;
}

/** Outline it, the message it waited for with that message's maker, and what does the same elsewhere. */
function drawHovered({ kind, timeline, index }) {
  if (index === null || kind === "curve" || kind === "lane") return;
  if (kind === "collective") return membersOf(timeline, index).forEach((i) => outlineCollective(timeline, i));
  if (kind !== "message" && timeline.computes.collective[index] >= 0)
    membersOf(timeline, timeline.computes.collective[index]).forEach((i) => outlineCollective(timeline, i));
  const message = kind === "message" ? index : timeline.computes.cause[index];
  if (message >= 0) {
    strokeMessages(overlay, timeline, [message], payloadColor(timeline.messages.payload[message]), 2.5);
    outline(timeline, timeline.messages.maker[message], colors.muted);
  }
  if (kind === "message") return;
  outline(timeline, index, colors.text);
  for (const other of timelines) outline(other, counterpart(timeline, other, index) ?? -1, colors.focus);
}

/** A frame that stays: around what was clicked, or found. */
function drawSelected(what) {
  drawHovered(what);
  if (what.kind === "compute") outline(what.timeline, what.index, colors.focus, 3);
}

function outlineCollective(timeline, i) {
  if (!timeline.lanes[timeline.collectives.rank[i]]?.band) return;
  const [left, top, width, height] = bandRect(timeline, i);
  overlay.strokeStyle = colors.text;
  overlay.lineWidth = 2;
  overlay.strokeRect(left - 0.5, top - 1, width + 1, height + 2);
}

function outline(timeline, i, color, thickness = 2) {
  if (i < 0 || !timelines.includes(timeline)) return;
  const { rank, start, end } = timeline.computes;
  const { y, box } = timeline.lanes[rank[i]];
  overlay.strokeStyle = color;
  overlay.lineWidth = thickness;
  overlay.strokeRect(x(start[i]) - 0.5, y - 1, Math.max(x(end[i]) - x(start[i]), 2), box + 2);
}

function drawScrollbar() {
  const room = page.height - TOP, all = page.bottom - TOP;
  const share = room / all;
  if (share < 1) fill(colors.edge, page.width - 9, TOP + view.top * share, 6, room * share);
}
