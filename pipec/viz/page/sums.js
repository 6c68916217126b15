// Sums: what the time of a rank is spent on, in the whole step or in a range that was picked.

/** The sums of each rank over the whole step, made once. */
const sumsOf = (timeline) => (timeline.sums ??= timeline.peaks.map((_, rank) => sumsBetween(timeline, rank, 0, timeline.makespan)));

/**
 * The sums of a rank between two times.
 *
 * A rank that is idle before a compute waits for the rank whose compute makes the message, then for the message;
 * or for the last rank to reach a collective, then for the collective. Before its first compute and after its
 * last, idle time is counted apart: it comes of the shape of the pipeline.
 * @returns {Sums}
 */
function sumsBetween(timeline, rank, from, to) {
  const { computes: { start, end, phase }, first } = timeline;
  const sums = {
    phases: data.phases.map(() => 0), waiting: new Map(), messages: 0, collectives: 0, copies: 0,
    host: 0, other: 0, before: 0, after: 0, hidden: hiddenBetween(timeline, rank, from, to),
  };
  const within = (a, b) => Math.max(Math.min(b, to) - Math.max(a, from), 0);
  const [begin, last] = [first[rank], first[rank + 1]];
  for (let i = firstAbove(end, from, begin, last); i < last; i++) {
    const free = i > begin ? end[i - 1] : 0;
    if (free >= to) break;
    sums.phases[phase[i]] += within(start[i], end[i]);
    if (start[i] <= free) continue;
    const onHost = i === begin ? Math.min(timeline.host, start[i]) : 0;
    sums.host += within(free, onHost);
    if (i === begin) sums.before += within(Math.max(free, onHost), start[i]);
    else addWait(timeline, sums, i, free, within);
  }
  addEnd(timeline, rank, sums, last > begin ? end[last - 1] : 0, within);
  for (const kind of ["messages", "collectives", "copies"]) sums.hidden[kind] = Math.max(sums.hidden[kind] - sums[kind], 0);
  return sums;
}

function addWait(timeline, sums, i, free, within) {
  const { computes, messages, collectives } = timeline;
  const until = computes.start[i];
  const c = computes.collective[i], m = computes.cause[i];
  if (c >= 0 && isCopy(timeline, c)) sums.copies += within(free, until);
  else if (c >= 0) addCollective(timeline, sums, c, free, until, within);
  else if (m >= 0) {
    const maker = messages.maker[m];
    const made = Math.min(Math.max(maker >= 0 ? computes.end[maker] : 0, free), until);
    addTo(sums.waiting, messages.rank[m], within(free, made));
    sums.messages += within(made, until);
  } else sums.other += within(free, until);
}

function addCollective({ collectives }, sums, c, free, until, within) {
  const last = collectives.last[c];
  const came = Math.min(Math.max(collectives.start[last], free), until);
  if (last !== c) addTo(sums.waiting, collectives.rank[last], within(free, came));
  sums.collectives += within(last === c ? free : came, until);
}

/** After its last compute a rank may still be in collectives. */
function addEnd(timeline, rank, sums, worked, within) {
  let free = worked;
  for (let c = timeline.firstCollective[rank]; c < timeline.firstCollective[rank + 1]; c++) {
    if (timeline.collectives.end[c] <= free || isCopy(timeline, c)) continue;
    addCollective(timeline, sums, c, free, timeline.collectives.end[c], within);
    free = timeline.collectives.end[c];
  }
  sums.after += within(free, timeline.makespan);
}

const addTo = (map, key, amount) => amount > 0 && map.set(key, (map.get(key) ?? 0) + amount);

/** How long messages come to a rank, and its collectives and copies run, whether it waits for them or not. */
function hiddenBetween(timeline, rank, from, to) {
  const { messages, collectives } = timeline;
  const within = (a, b) => Math.max(Math.min(b, to) - Math.max(a, from), 0);
  const found = { messages: 0, collectives: 0, copies: 0 };
  for (const m of incoming(timeline)[rank]) found.messages += within(messages.start[m], messages.end[m]);
  for (let c = timeline.firstCollective[rank]; c < timeline.firstCollective[rank + 1]; c++)
    found[isCopy(timeline, c) ? "copies" : "collectives"] +=
      within(Math.max(collectives.start[c], collectives.start[collectives.last[c]]), collectives.end[c]);
  return found;
}

/** The messages to each rank; none are listed where the page has only some. */
function incoming(timeline) {
  if (timeline.incoming) return timeline.incoming;
  timeline.incoming = timeline.peaks.map(() => []);
  if (timeline.allMessages) timeline.messages.peer.forEach((rank, m) => timeline.messages.microbatch[m] >= 0 && timeline.incoming[rank].push(m));
  return timeline.incoming;
}

const total = (numbers) => numbers.reduce((sum, each) => sum + each, 0);
const waitingTime = ({ waiting }) => total([...waiting.values()]);

/** The parts of a rank's time, in the order in which they are shown: name, time, colour. */
function partsOf(sums) {
  return [
    ...data.phases.map(({ name, key }, i) => [name, sums.phases[i], key]),
    ["waits for other ranks", waitingTime(sums), "waiting"],
    ["messages", sums.messages, "activation"],
    ["collectives", sums.collectives, "reduce_grad"],
    ["copies", sums.copies, "offload"],
    ["host", sums.host, "other"],
    ["other idle time", sums.other, "idle"],
    ["idle at the start", sums.before, "corner"],
    ["idle at the end", sums.after, "corner"],
  ];
}

const idleOf = (sums) => total(partsOf(sums).slice(data.phases.length).map(([, time]) => time));

/** Parts that occur somewhere: [name, colour], with a function from sums to the time of the part. */
function occurringParts(allSums, least) {
  const all = allSums.map(partsOf);
  if (!all.length) return [];
  return all[0].map(([name, , color], k) => ({ name, color, time: (sums) => partsOf(sums)[k][1] }))
    .filter(({ time }) => allSums.some((sums) => time(sums) > least));
}
