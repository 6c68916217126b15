// What page_data.py and html.py hand to the page.

type Numbers = Int8Array | Int16Array | Int32Array | Float64Array;

interface Named { key: string; name: string; letter: string; copies?: boolean }
interface Curve {
  time: Numbers; amount: Numbers; kinds?: Record<string, Numbers>; host?: Numbers;
  most?: number; mostOnHost?: number; stack?: [string, Numbers, Numbers][]; // made when it is first drawn
}

interface Timeline {
  name: string; schedule: string; part: "whole" | "accumulate" | "update"; microbatches: number; summary: string; findings: string[];
  makespan: number; span: number; bubble: number; idle: number; host: number;
  isRun: boolean; note: string; allMessages: boolean;
  peaks: number[]; names: string[]; numbers: number[]; replicas: string[]; groups: number[];
  computes: Record<"rank" | "phase" | "stage" | "chunk" | "microbatch" | "segment" | "version" | "start" | "end" | "cause" | "collective", Numbers>;
  messages: Record<"rank" | "peer" | "payload" | "source" | "target" | "microbatch" | "start" | "end" | "maker", Numbers>;
  collectives: Record<"rank" | "op" | "stage" | "bucket" | "microbatch" | "model_collective" | "last" | "row" | "words" | "start" | "end" | "came", Numbers> & { told: string[] };
  critical: Record<"computes" | "messages" | "collectives", Numbers>;
  inFlight: Curve[]; memory: Curve[];
  // made by prepare():
  first: number[]; firstCollective: number[]; firstMessage: number[]; numRows: number; lastChunk: number;
  onPath: Set<number>; collectivesOnPath: Set<number>; lanes: Lane[]; named?: Map<string, number>;
  fills: string[][]; visible: number[]; incoming?: number[][]; sums?: Sums[]; stageTimes?: number[]; longestMessage?: number;
}

interface Lane {
  timeline: Timeline; rank: number; y: number; pitch: number; box: number; curveY: number; curve: number;
  bandY?: number; band?: number;
}

/** The time of a rank by what it is spent on; all but `hidden` and `busy` add up to the time of the range. */
interface Sums {
  phases: number[]; waiting: Map<number, number>; messages: number; collectives: number; copies: number;
  host: number; other: number; before: number; after: number; hidden: { messages: number; collectives: number; copies: number };
}

/** What is under the pointer, or selected. */
interface Thing { kind: "compute" | "idle" | "collective" | "message" | "curve" | "lane"; timeline: Timeline; rank: number; index: number | null; time?: number }

interface Pipeline {
  stages: { ranks: number[]; modules: string[] }[];
  sources: string[];
  programs: { rank: number; lines: string[]; blocking: number[] }[];
  notes: [number, string][];
  alternatives: { schedule: string; microbatches: number; stages: number; seconds: number; peak: number; rejected: string }[];
}

interface PageData {
  unit: string; phases: Named[]; ops: Named[]; payloads: string[]; timelines: Timeline[];
  pipeline: Pipeline | null; limits: number[];
}
