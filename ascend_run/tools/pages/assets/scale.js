// From values to pixels and back, and where an axis has its ticks.

function linearScale(low, high, from, to) {
  const span = high - low || 1;
  const scale = (value) => from + (value - low) / span * (to - from);
  scale.invert = (pixel) => low + (pixel - from) / (to - from) * span;
  scale.ticks = (count) => linearTicks(low, high, count);
  return scale;
}

function logScale(low, high, from, to) {
  const inner = linearScale(Math.log10(low), Math.log10(high), from, to);
  const scale = (value) => inner(Math.log10(value));
  scale.invert = (pixel) => 10 ** inner.invert(pixel);
  scale.ticks = (count) => logTicks(low, high, count);
  return scale;
}

/** Multiples of 1, 2 or 5 times a power of ten. */
function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0) || !Number.isFinite(rough)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return ticks.length ? ticks : [low];
}

/** Powers of ten; between few of them 2 and 5 as well; within one, as a linear axis has them. */
function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 0.8) return linearTicks(low, high, count).filter((tick) => tick > 0);
  const factors = decades > 3 ? [1] : [1, 2, 5];
  const every = Math.max(1, Math.ceil(decades / (count * 1.5)));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    if (power % every) continue;
    for (const factor of factors) {
      const tick = factor * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  return ticks;
}

/** The index of the entry of a sorted list that is nearest to a value. */
function nearest(sorted, value) {
  let low = 0;
  let high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle; else high = middle;
  }
  return Math.abs(sorted[low] - value) <= Math.abs(sorted[high] - value) ? low : high;
}
