// Which words two texts have in common: the longest common subsequence of their words.

const MOST = 1500; // words of a text that are compared; the table has the square of that

export function split(text) {
  return text.match(/\s+|[^\s]+/gu) ?? [];
}

// Both texts as lists of [piece, whether only this text has it]; spaces are never marked.
export function compare(left, right) {
  const a = split(left), b = split(right);
  const x = words(a).slice(0, MOST), y = words(b).slice(0, MOST);
  const common = matching(x, y);
  return [marked(a, x.length, new Set(common.map(([i]) => i))), marked(b, y.length, new Set(common.map(([, j]) => j)))];
}

function words(pieces) {
  return pieces.filter((piece) => /\S/u.test(piece));
}

function marked(pieces, count, shared) {
  let place = -1;
  return pieces.map((piece) => {
    if (!/\S/u.test(piece)) return [piece, false];
    place += 1;
    return [piece, place < count && !shared.has(place)];
  });
}

// Pairs of places with equal words, in order.
function matching(x, y) {
  let start = 0;
  while (start < x.length && start < y.length && x[start] === y[start]) start += 1;
  const n = x.length - start, m = y.length - start;
  const longest = Array.from({ length: n + 1 }, () => new Uint16Array(m + 1));
  for (let i = n - 1; i >= 0; i--) {
    for (let j = m - 1; j >= 0; j--) {
      longest[i][j] = x[start + i] === y[start + j]
        ? longest[i + 1][j + 1] + 1
        : Math.max(longest[i + 1][j], longest[i][j + 1]);
    }
  }
  const pairs = Array.from({ length: start }, (_, place) => [place, place]);
  for (let i = 0, j = 0; i < n && j < m;) {
    if (x[start + i] === y[start + j]) pairs.push([start + i++, start + j++]);
    else if (longest[i + 1][j] >= longest[i][j + 1]) i += 1;
    else j += 1;
  }
  return pairs;
}
