// Numbers as people read them.

const BINARY = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];

/** A value with about `digits` significant digits; bytes in binary units. */
function formatValue(value, unit, digits = 4) {
  if (value === null || value === undefined) return 'not finite';
  if (unit === 'bytes') {
    const power = binaryPower(Math.abs(value));
    return `${trimmed((value / 1024 ** power).toPrecision(digits))} ${BINARY[power]}`;
  }
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) {
    return trimmed(value.toExponential(digits - 2)).replace('e+', 'e');
  }
  if (size >= 1000) return Math.round(value).toLocaleString('en-US');
  return trimmed(value.toPrecision(digits));
}

/** The tick labels of an axis: as short as tells them apart. */
function formatTicks(ticks, unit) {
  const largest = Math.max(...ticks.map(Math.abs));
  if (unit === 'bytes') {
    const power = binaryPower(largest);
    return ticks.map((tick, i) =>
      `${plainNumber(tick / 1024 ** power)}${i === ticks.length - 1 ? ` ${BINARY[power]}` : ''}`);
  }
  if (largest !== 0 && (largest < 1e-2 || largest >= 1e9)) {
    const power = Math.floor(Math.log10(largest) + 1e-9);
    const few = Math.min(...ticks.filter((tick) => tick > 0)) < largest / 50;  // a log axis
    return ticks.map((tick) => {
      if (tick === 0) return '0';
      return few ? trimmed(tick.toExponential(1)).replace('e+', 'e') : `${plainNumber(tick / 10 ** power)}e${power}`;
    });
  }
  return ticks.map((tick) => largest >= 10000 ? thousands(tick) : plainNumber(tick));
}

function thousands(value) {
  if (value === 0) return '0';
  if (Math.abs(value) >= 1e6) return `${plainNumber(value / 1e6)}M`;
  return Math.abs(value) >= 1000 ? `${plainNumber(value / 1e3)}k` : plainNumber(value);
}

function binaryPower(size) {
  return size < 1 ? 0 : Math.min(BINARY.length - 1, Math.floor(Math.log2(size) / 10));
}

/** Without the noise that 0.1 + 0.2 leaves behind. */
function plainNumber(value) {
  return String(Number(value.toPrecision(10)));
}

/** Without zeros that say nothing: `1.500` is `1.5`, `2.0e-4` is `2e-4`. */
function trimmed(text) {
  const [mantissa, exponent] = text.split('e');
  const short = mantissa.includes('.') ? mantissa.replace(/\.?0+$/, '') : mantissa;
  return exponent === undefined ? short : `${short}e${exponent}`;
}
