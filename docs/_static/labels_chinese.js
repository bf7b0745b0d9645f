// SPDX-License-Identifier: Apache-2.0
// The labels of buttons and icons that the theme writes in English into every page: read aloud, or shown as a hint.

const LABELS = {
  "Toggle site navigation sidebar": "显示或隐藏菜单",
  "Toggle table of contents sidebar": "显示或隐藏本页目录",
  "Toggle Light / Dark / Auto color theme": "切换浅色、深色或自动配色",
  Contents: "本页目录",
  Menu: "菜单",
  Expand: "展开",
  "Light mode": "浅色",
  "Dark mode": "深色",
  "Auto light/dark, in light mode": "自动配色，当前浅色",
  "Auto light/dark, in dark mode": "自动配色，当前深色",
};

document.addEventListener("DOMContentLoaded", () => {
  for (const one of document.querySelectorAll("[aria-label]")) {
    const label = one.getAttribute("aria-label");
    one.setAttribute("aria-label", LABELS[label] ?? label.replace(/^Toggle navigation of /, "展开或收起："));
  }
  for (const title of document.querySelectorAll("symbol > title")) {
    title.textContent = LABELS[title.textContent] ?? title.textContent;
  }
});
