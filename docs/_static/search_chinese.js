// SPDX-License-Identifier: Apache-2.0
// What Sphinx's search lacks for Chinese pages.

// Sphinx 9.0 asks for a stemmer by the name of the language, and brings the English one for the Latin words.
function ChineseStemmer() {
  return new EnglishStemmer();
}

// Splits what is searched for into words. Chinese has no spaces between them, and Sphinx splits at spaces only.
// Without the browser's Intl.Segmenter a query is searched for in one piece.
var splitQuery = (query) => {
  const pieces = query.split(/[^\p{Letter}\p{Number}_]+/gu).filter((piece) => piece);
  if (typeof Intl.Segmenter === "undefined") return pieces;
  const segmenter = new Intl.Segmenter("zh", { granularity: "word" });
  return pieces.flatMap((piece) => {
    if (!/\p{Script=Han}/u.test(piece)) return [piece];
    const words = Array.from(segmenter.segment(piece), (part) => part.segment);
    // The index is split by another dictionary: single characters that one splits off, the other does not have.
    const longer = words.filter((word) => word.length > 1);
    return longer.length > 0 ? longer : words;
  });
};
