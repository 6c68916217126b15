// Columns: the data of the page, as `packed_data.py` packed it.

/** The data that `text` holds: base64 of compressed JSON with columns of numbers behind it. */
async function unpack(text) {
  const compressed = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([compressed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const packed = new Uint8Array(await new Response(stream).arrayBuffer());
  const length = new DataView(packed.buffer).getUint32(0, true);
  const columns = packed.subarray(4 + length);
  const restored = (_, value) => (value?.["#column"] ? readColumn(columns, value["#column"]) : value);
  return JSON.parse(new TextDecoder().decode(packed.subarray(4, 4 + length)), restored);
}

const ARRAYS = { Int8Array, Int16Array, Int32Array, Float64Array };

/** Add up differences, each of `width` bytes in planes: first the lowest byte of all, last the highest. */
function readColumn(bytes, [offset, count, width, divisor, array]) {
  const numbers = new ARRAYS[array](count);
  const planes = Array.from({ length: width }, (_, k) => bytes.subarray(offset + k * count, offset + (k + 1) * count));
  const signs = new Int8Array(planes[width - 1].buffer, planes[width - 1].byteOffset, count);
  const powers = planes.map((_, k) => 256 ** k);
  for (let i = 0, sum = 0; i < count; i++) {
    sum += signs[i] * powers[width - 1];
    for (let k = 0; k < width - 1; k++) sum += planes[k][i] * powers[k];
    numbers[i] = divisor === 1 ? sum : sum / divisor;
  }
  return numbers;
}
