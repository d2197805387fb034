"""Answers of the handler `stem`: letters that are stated and never guessed, numbers, units and texts.

Each table takes further cases, one on a line.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from rollyard_crds import RolloutJobSpec, Task
from rollyard_pipeline.errors import TaskInvalid
from rollyard_pipeline.handlers.answers import final_answer
from rollyard_pipeline.handlers.base import ANSWER, StageContext
from rollyard_pipeline.handlers.stem import StemHandler, letter
from rollyard_pipeline.handlers.units import unit

CHOICES = ["iron", "gold", "an alloy of A and B", "12 m/s"]
SPEC = RolloutJobSpec.model_validate(
    {"tasks": {"stream": True}, "handler": "stem", "agent": {"type": "oracle"}}
)


def context(said: str, /, **task: Any) -> StageContext:
    given = Task.model_validate({"id": "a", "prompt": "?", **task})
    return StageContext(given, SPEC, "rollout", 0, 60.0, carry={ANSWER: said})


async def score(said: str, /, **task: Any) -> float:
    return (await StemHandler().eval(context(said, **task))).reward


LETTERS: list[tuple[str, str | None]] = [
    ("Answer: B", "B"), ("The answer is (B).", "B"), ("the answer is a mixture", None),
    ("The answer is (b)", "B"), ("**Answer:** **B**", "B"), ("answer choice B", "B"),
    ("The correct answer is choice B, as A is wrong.", "B"), ("B", "B"), ("(b)", "B"), ("B.", "B"),
    ("b", "B"), ("**B**", "B"), ("**(B)**", "B"), ("[B]", "B"), ("$B$", "B"), (r"\textbf{B}", "B"),
    (r"$\mathbf{B}$", "B"), (r"$\text{(B)}$", "B"), ("`B`", "B"), ("Thus:\nB) gold", "B"), ("gold", "B"),
    ("Gold.", "B"), ("Answer: A\nNo. Answer: B", "B"), ("Answer: A. No, wait: Answer: B", "B"),
    ("Option B", "B"), ("option (B).", "B"), ("Choice B", "B"), ("I choose B", "B"), ("I'd go with B.", "B"),
    ("I would select option B", "B"), ("答案：B", "B"), ("答案是 B。", "B"),
    ("正确答案是B。", "B"), ("所以选B", "B"), ("故选：B", "B"), ("答案为（B）", "B"), ("应选 B", "B"),
    ("The correct answer is **B) gold**", "B"),
    ("The correct option is B", "B"), ("The right choice is (B)", "B"), ("B is correct", "B"),
    ("(B) is the correct answer.", "B"), ("Option B is the right choice", "B"), ("Therefore, B.", "B"),
    ("So the answer would be B", "B"), ("my answer: B", "B"), ("ANSWER: B", "B"), ("Answer = B", "B"),
    ("The answer is:\n(B)", "B"), ("Answer:\n\n**B**", "B"), ("### Answer: B", "B"),
    ("**Final Answer**: B", "B"), ("Answer: Option B", "B"), ("Answer: option (b)", "B"),
    ("The answer is option B: gold", "B"), (r"The answer is $\text{B}$", "B"),
    (r"The answer is \textbf{(B)}", "B"), ("Answer: b", "B"), ("answer: b)", "B"), ("answer is b.", "B"),
    ("Answer: Ｂ", "B"), ("The answer is “B”.", "B"), ("(D) 12 m/s", "D"), ("D. 12 m/s", "D"),
    ("D: 12 m/s", "D"), ("12 m/s", "D"), (r"12\ \text{m/s}", "D"), (r"$12\,\mathrm{m/s}$", "D"),
    ("C) an alloy of A and B", "C"), ("Answer: C) an alloy of A and B", "C"), ("an alloy of A and B", "C"),
    ("The answer is B because A rusts", "B"), ("Answer: B\nExplanation: gold does not rust", "B"),
    ("The answer is B, not A", "B"), ("It depends on A", None), ("B. It depends", None), ("", None),
    ("Answer: Z", None), ("The answer is Always iron", None), ("I am sure that B is wrong and C is", None),
    ("answer: none of A, B", None), ("B and C", None), ("A or B", None), ("Answer: A or B", None),
    ("Answer: A and B", None), ("Answer: A, B", None), ("Answer: A/B", None), ("Answer: A & B", None),
    ("Answer: B; C", None), ("Answer: (A) or (B)", None), ("The answer is B or maybe C", None),
    ("The answer is B (or possibly C)", None), ("either A or B", None), ("Answer: A B C D", None),
    ("Answer: ABCD", None), ("A B C D", None), ("Answer: A、B", None), ("答案：A或B", None),
    ("Answer: \u0412", None), ("Answer: \u0412", None), ("\u0392", None), ("iron gold", None),
    ("iron or gold", None), ("Answer: B) iron", None), ("B) iron", None), ("Answer: E", None), ("E", None),
    ("the answer is not B", None), ("Answer: not B", None), ("A-B", None), ("Answer: A-B", None),
    ("Answer: B+C", None), ("Beryllium", None), ("Answer: Beryllium", None),
    ("I think the answer may be any of them", None), ("2", None), ("Answer: 2", None),
    ("So B is the answer.", "B"), ("因此选B", "B"), ("应该选择B。", "B"), ("不应该选择B。", None),
    ("不应选B", None),
    ("The answer is gold.", "B"), ("Answer: **gold** (option B)", "B"), ("gold (B)", "B"), ("gold (A)", None),
    ("The answer is not gold.", None), ("The answer is iron or gold.", None), ("12m/s", "D"),
    ("The answer is 12 m/s.", "D"), ("The answer is A metal.", None), ("The answer is A proton", None),
    ("The answer is A since iron rusts", "A"), ("The answer is (A) since iron rusts", "A"),
    ("Answer: B is wrong", None), ("答案B是错的", None), ("The answer is B, which isn't A", "B"),
    ("B is not the answer", None), ("The answer is A iron", "A"),
]  # fmt: skip
"""What is said, and the letter that it chooses."""


@pytest.mark.parametrize(("said", "chosen"), LETTERS)
def test_the_letter_that_a_text_chooses(said: str, chosen: str | None) -> None:
    assert letter(said, CHOICES) == chosen


def test_an_article_is_no_letter() -> None:
    assert letter("The answer is A dog.", ["a cat", "a dog"]) == "B"
    assert letter("The answer is A and B.", ["iron", "gold", "A and B"]) == "C"


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("Answer: B", 1), ("<answer>B</answer>", 1), ("<answer> (B) </answer>", 1), ("<answer>A</answer>", 0),
        (r"\boxed{B} or C", 0), (r"\boxed{B}, C", 0), (r"\(\boxed{B}\) or maybe \(C\)", 0),
        (r"\boxed{B} is wrong", 0), (r"\boxed{B}. A is wrong.", 1), (r"\boxed{B} and it is gold", 1),
        ("<answer>A</answer> <answer>B</answer>", 0), ("Answer: A", 0), ("A B C D", 0), ("", 0),
        (r"So \boxed{B}", 1),
        (r"\boxed{\text{B}}", 1), (r"\boxed{\text{(B) gold}}", 1), (r"The answer is $\boxed{B}$", 1),
        (r"\boxed{\textbf{(B)}\ \text{gold}}", 1), (r"\boxed{b}", 1), (r"\boxed{\text{Option B}}", 1),
        (r"\boxed{gold}", 1), (r"\boxed{B}: \boxed{\text{gold}}", 1), ("\\boxed{A}\nNo: \\boxed{B}", 1),
        (r"\boxed{A, B}", 0), (r"\boxed{}", 0), (r"\boxed{B} or \boxed{A}", 0),
        (r"\boxed{A} or \boxed{B}", 0), (r"\boxed{A}\boxed{B}", 0), (r"Answer: B \boxed{A}", 0),
        (r"\boxed{\text{(B) iron}}", 0),
    ],
)  # fmt: skip
async def test_choices_are_scored(said: str, reward: float) -> None:
    assert await score(said, answer="B", choices=CHOICES) == reward


RIGHT_NUMBERS = [
    ("450", "450", "K"), ("450 K", "450", "K"), ("450K", "450", "K"), ("450 K.", "450", "K"),
    (r"T_2 = 450\ \text{K}", "450", "K"), (r"T_{2} = 450 \mathrm{K}", "450", "K"), ("T2 = 450 K", "450", "K"),
    (r"\approx 450", "450", "K"), (r"$\approx 450\,\mathrm{K}$", "450", "K"), ("≈450 K", "450", "K"),
    ("~450 K", "450", "K"), (r"\sim 450~\text{K}", "450", "K"), ("approximately 450 K", "450", "K"),
    ("about 450 kelvin", "450", "K"), ("ca. 450 K", "450", "K"), (r"T \simeq 450", "450", "K"),
    (r"4.5 \cdot 10^{2}", "450", "K"), ("4.5·10²", "450", "K"), (r"4.5\times10^2\ \text{K}", "450", "K"),
    ("4.5 × 10^2 K", "450", "K"), ("4.5 x 10^2 K", "450", "K"), ("4.5x10² K", "450", "K"),
    ("4.5*10^2", "450", "K"), ("4.5*10**2", "450", "K"), ("4.5e2 K", "450", "K"), ("4.5E+02", "450", "K"),
    ("**450 K**", "450", "K"), ("**450** K", "450", "K"), ("*450 K*", "450", "K"), ("`450 K`", "450", "K"),
    (r"\boxed{450}", "450", "K"), (r"\boxed{450\ \text{K}}", "450", "K"),
    (r"\boxed{\text{450 K}}", "450", "K"), (r"\boxed{T_2 = 450\,\mathrm{K}}", "450", "K"),
    (r"So $\boxed{\mathbf{450\ K}}$.", "450", "K"), (r"\(450\ \mathrm{K}\)", "450", "K"),
    (r"$$450\ \text{ K}$$", "450", "K"), ("４５０ K", "450", "K"), ("The temperature is 450 K.", "450", "K"),
    ("It rises to 450 K at equilibrium.", "450", "K"), ("The answer is 450 K", "450", "K"),
    ("The final answer is **450 K**.", "450", "K"), ("答案：450 K。", "450", "K"),
    ("Answer: 450 in K", "450", "K"), ("450 [K]", "450", "K"), ("450 (K)", "450", "K"),
    ("450 degrees Kelvin", "450", "K"), ("450 kelvins", "450", "K"), ("450 ± 5 K", "450", "K"),
    (r"(450 \pm 5)\ \text{K}", "450", "K"), ("450 +/- 5 K", "450", "K"), ("450 K ± 5 K", "450", "K"),
    ("450 K ± 1%", "450", "K"), (r"\SI{450}{K}", "450", "K"), (r"\qty{450}{K}", "450", "K"),
    ("450 K (177 °C)", "450", "K"), (r"\boxed{450 K} = \boxed{177 °C}", "450", "K"),
    ("T = 2·225 K = 450 K", "450", "K"), ("F = 5·2 N = 10 N", "10", "N"), ("F_1 = ma ≈ 10 N", "10", "N"),
    ("−5", "-5", ""), ("–5", "-5", ""), ("-5", "-5", ""), ("x = - 5", "-5", ""), ("x=-5", "-5", ""),
    ("10^{-5}", "1e-5", ""), ("10⁻⁵", "1e-5", ""), ("10^-5", "1e-5", ""), ("10^(-5)", "1e-5", ""),
    ("10^{−5}", "1e-5", ""), ("1×10−5", "1e-5", ""), ("-10^{-5}", "-1e-5", ""), (r"\frac34", "0.75", ""),
    (r"\frac{3}{4}", "0.75", ""), (r"\dfrac{3}{4}", "0.75", ""), ("3/4", "0.75", ""), ("¾", "0.75", ""),
    (r"-\frac{3}{4}", "-0.75", ""), ("0.75", "3/4", ""), (".75", "0.75", ""), ("2 1/4", "2.25", ""),
    ("2¼", "2.25", ""), (r"2\frac14", "2.25", ""), (r"2 \tfrac{1}{4}", "2.25", ""), (r"\sqrt2", "1.414", ""),
    (r"\frac{\sqrt{3}}{2}", "0.866", ""), ("√10", "3.162", ""), ("sqrt(2)", "1.414", ""),
    (r"2\pi", "6.283", ""), (r"\frac{\pi}{2}\ \text{rad}", "90", "°"), ("2 pi", "6.283", ""),
    ("1,234.5", "1234.5", ""), ("1 234.5", "1234.5", ""), ("1{,}234.5", "1234.5", ""),
    (r"1\,234.5", "1234.5", ""), ("1\u2009234.5", "1234.5", ""), ("1.234,5", "1234.5", ""),
    (r"\boxed{1,5}", "1.5", ""), (r"\boxed{0,125}", "0.125", ""), ("12,000,000", "1.2e7", ""),
    ("5 million", "5e6", ""), ("5 dozen", "60", ""),
    ("6.67430(15) × 10^{-11} m^3 kg^-1 s^-2", "6.674e-11", "N m^2/kg^2"), ("50%", "50", "%"),
    (r"50\%", "50", "%"), ("50 percent", "50", "%"), ("0.5", "50%", ""), ("50 %", "0.5", ""),
    ("3 bolts", "3", ""), ("18 dollars", "18", ""), (r"$\$18$", "18", ""),
    ("It has 4 unpaired electrons.", "4", ""), ("25 °C", "25", "°C"), ("25°C", "25", "°C"),
    (r"25^\circ\text{C}", "25", "°C"), ("25 ℃", "25", "°C"), (r"25\,^{\circ}\mathrm{C}", "25", "°C"),
    ("25 degrees Celsius", "25", "°C"), ("25 C", "25", "°C"), ("77 °F", "25", "°C"), ("298.15 K", "25", "°C"),
    ("25 °C", "298.15", "K"), ("25 degrees C", "25", "°C"), ("10 J/K", "10", "J/°C"), ("30°", "30", "°"),
    (r"30^\circ", "30", "°"), ("30 degrees", "30", "°"), ("0.5236 rad", "30", "°"),
    ("1800 arcmin", "30", "°"), ("30° 30′", "30.5", "°"), ("30°", "0.5236", ""), ("1 h 30 min", "90", "min"),
    ("1 hour and 30 minutes", "1.5", "h"), ("5400 seconds", "1.5", "h"), ("2 weeks", "14", "days"),
    ("5730 years", "5730", "yr"), ("carbon-14: 5730 yr", "5730", "year"), ("4.5 Gyr", "4.5e9", "yr"),
    ("1 AU", "1.496e11", "m"), ("4.246 light-years", "1.302", "pc"), ("10 lb", "4.536", "kg"),
    ("12 inches", "1", "ft"), ("1 mile", "1609", "m"), ("1 gallon", "3.785", "L"), ("14.7 psi", "1", "atm"),
    ("760 torr", "1", "atm"), ("760 mm Hg", "101.3", "kPa"), ("1013 mbar", "1", "atm"), ("3 ppm", "3e-6", ""),
    ("2 Gy", "200", "cGy"), ("1 mSv", "1e-3", "Sv"), ("60 rpm", "1", "Hz"), ("3 dB", "3", "dB"),
    ("60 rpm", "6.283", "rad/s"), ("50 s^-1", "50", "Hz"), ("2 s⁻¹", "2", "rad/s"),
    ("6.283 rad/s", "1", "Hz"), ("0.5 mol/L", "0.5", "M"), ("500 mM", "0.5", "mol/L"),
    ("0.5 mol dm⁻³", "0.5", "M"), ("0.5 molar", "0.5", "M"), ("1 kWh", "3.6", "MJ"),
    ("1 kilowatt-hour", "3.6e6", "J"), ("1 eV", "1.602e-19", "J"), ("1 kcal", "4.184", "kJ"),
    ("0.511 MeV/c^2", "9.109e-31", "kg"), ("1 u", "1.6605e-27", "kg"), ("18 Da", "18", "u"),
    ("1 hartree", "27.21", "eV"), ("1 bohr", "0.529", "Å"), ("1 erg", "1e-7", "J"), ("1 dyn", "1e-5", "N"),
    ("10 gauss", "1", "mT"), ("1 cP", "1", "mPa s"), ("3 kΩ", "3000", "ohm"),
    (r"3\ \text{k}\Omega", "3000", "Ω"), (r"5\,\mu\text{m}", "5", "um"), ("5 µm", "5", "μm"),
    ("5 microns", "5e-6", "m"), (r"1\ \text{\AA}", "0.1", "nm"), (r"9.8\ \mathrm{m\,s^{-2}}", "9.8", "m/s^2"),
    ("9.8 m·s⁻²", "9.8", "m/s^2"), ("9.8 m/s/s", "9.8", "m/s^2"), ("9.8 m/s²", "9.8", "m/s^2"),
    (r"9.8\ \frac{\text{m}}{\text{s}^2}", "9.8", "m/s^2"), ("9.8 N/kg", "9.8", "m/s^2"),
    ("9.8 meters per second squared", "9.8", "m/s^2"), ("980 cm s-2", "9.8", "m/s^2"),
    ("8.314 J/(mol·K)", "8.314", "J/mol/K"), ("8.314 J mol^{-1} K^{-1}", "8.314", "J/mol/K"),
    ("8.314 J/mol·K", "8.314", "J/(mol K)"), ("8.314 J/mol K", "8.314", "J/(mol K)"),
    ("36 km/h", "10", "m/s"), ("36 kilometers per hour", "10", "m/s"), ("5 N m", "5", "J"),
    ("5 N·m", "5", "Nm"), ("5 N-m", "5", "Nm"), (r"25\ \text{MPa}\sqrt{\text{m}}", "25", "MPa m^(1/2)"),
    ("1 cubic meter", "1000", "L"), ("100 cm^{3}", "0.1", "L"), ("70 km s⁻¹ Mpc⁻¹", "70", "km/s/Mpc"),
    ("5.67e-8 W m^-2 K^-4", "5.67e-8", "W/(m^2 K^4)"), ("5 m in total", "5", "m"),
    ("5 m above the ground", "5", "m"), ("5 in", "0.127", "m"), ("0.6c", "1.8e8", "m/s"),
    ("(1.5 ± 0.1) × 10^3 m", "1500", "m"), (r"5.0\times10^{-3}~\mathrm{mol\cdot L^{-1}}", "5e-3", "M"),
    (r"5\ \Omega\cdot\text{m}", "5", "ohm m"), ("+5 m", "5", "m"), ("5.", "5", "m"),
    (r"\text{pH} = 7.4", "7.4", ""), ("pH 7.4", "7.4", ""),
    (r"v = 3.0 \times 10^8 \, \frac{m}{s}", "3e8", "m/s"),
    (r"\begin{aligned} x &= 5\ \text{m} \end{aligned}", "5", "m"),
    (r"\begin{align*} x &= 2+3 \\ &= 5 \end{align*}", "5", "m"), ("6.02×10²³ mol⁻¹", "6.02e23", "1/mol"),
    ("5 °/s", "5", "deg/s"), ("4.18 J/g°C", "4.18", "J/(g K)"), ("4.18 J/(g·°C)", "4.18", "J/g/K"),
    ("1 cal/g-°C", "4.184", "J/g/K"), ("5 J.K-1.mol-1", "5", "J/mol/K"), ("5 M^{-1}s^{-1}", "5", "L/(mol s)"),
    ("100 ft-lb", "135.6", "J"), ("5 sq. m", "5", "m^2"), ("5 sq m", "5", "m^2"), ("3 y", "3", "yr"),
    ("450 K (rounded to 3 significant figures)", "450", "K"), ("450 K (to 3 s.f.)", "450", "K"),
    ("450 K, to two decimal places", "450", "K"), ("450 (approximately)", "450", "K"),
    ("450 K (approx.)", "450", "K"), ("450 K (since PV = nRT)", "450", "K"), ("minus 5", "-5", ""),
    ("negative 5 °C", "-5", "°C"), ("π/4", "0.7854", "rad"), ("1/√2", "0.7071", ""), ("√2/2", "0.7071", ""),
    ("“450”", "450", "K"), ('"450 K"', "450", "K"), ("5 (five)", "5", ""), ("450 K!", "450", "K"),
    ("4,5·10^2", "450", "K"), ("T=450K.", "450", "K"), ("T(K) = 450", "450", "K"),
    (r"\text{Answer: } 450\ \text{K}", "450", "K"), (r"\mathbf{450 \, K}", "450", "K"),
    (r"\underline{\underline{450\ K}}", "450", "K"), ("4.5 * 10 ^ 2 K", "450", "K"),
    ("450 K at the end", "450", "K"), ("It takes 2 hours and 30 minutes.", "2.5", "h"),
    (r"5\text{ }\mu\mathrm{F}", "5", "μF"), ("5 kg·m/s", "5", "kg m/s"), ("5 kg•m/s", "5", "N s"),
    ("−73,15 °C", "200", "K"), ("2 meters", "2", "m"), ("T = 450 K = 177 °C", "450", "K"),
    ("2.0(1) × 10³ m", "2000", "m"),
    ("16 cm^3.", "16", "cm^3"), (r"The answer is $9.8\ m/s^2$.", "9.8", "m/s^2"), ("4.5 × 10^2.", "450", "K"),
    ("5 Jmol^-1 K^-1", "5", "J/mol/K"), (r"25\ \mathrm{kJmol}^{-1}", "25", "kJ/mol"), ("2 kWh", "7.2", "MJ"),
    (r"$\mathrm{~8.314~J} \mathrm{~K}^{-1} \mathrm{~mol}^{-1}$", "8.314", "J/(mol K)"),
    ("450 K (177 degrees Celsius)", "450", "K"), (r"\therefore T = 450\ \mathrm{~K}", "450", "K"),
    (r"\boxed{100} N", "100", "N"), (r"$\boxed{100}\ \text{N}$.", "100", "N"), (r"\boxed{100}!", "100", "N"),
    (r"\boxed{100} newtons, as expected.", "100", "N"), (r"**\boxed{100}**", "100", "N"),
    (r"$$\boxed{100}$$ is the answer.", "100", "N"), (r"\boxed{100\text{ N}} downward", "100", "N"),
    (r"\boxed{100\text{ N}} up", "100", "N"), (r"\boxed{100} (to the left)", "100", "N"),
    (r"\boxed{100} \tag{1}", "100", "N"), (r"\boxed{100} \text{ km}", "1e5", "m"),
    (r"\boxed{5} million", "5e6", ""), (r"\boxed{5} \times 10^3", "5000", ""), (r"\boxed{5}\%", "5", "%"),
    (r"\boxed{9.8}\ \frac{\text{m}}{\text{s}^2}", "9.8", "m/s^2"), ("\\boxed{5}\nJ is energy", "5", "m"),
    (r"\boxed{450\ \text{K}} ✓", "450", "K"), (r"\boxed{5}\,\text{m} \quad \blacksquare", "5", "m"),
    ("力的大小为100 N。", "100", "N"), (r"\ln 2", "0.693", ""), (r"k = \ln(2)", "0.693", ""),
    ("- \\boxed{5}", "5", ""), (r"x - \boxed{5}", "5", ""), (r"**Answer:** _\boxed{5}_", "5", ""),
    (r"\boxed{450} K or 177 °C", "450", "K"), (r"$\boxed{450}$ K. It takes 5 or 6 h", "450", "K"),
    (r"\boxed{5} apples", "5", ""), ("500 cm = 5 m", "5", "m"), ("d = 2 m + 3 m = 5 m", "5", "m"),
    ("2/3 = 0.67", "0.667", ""), (r"\lambda = 6.63e-34 / 1e-24 = 0.663 nm", "0.663", "nm"),
    ("25 °C ± 1 K", "25", "°C"), ("450 K ± 0.1×10^2 K", "450", "K"), ("It has a power of 5 W", "5", "W"),
    ("a factor of 5", "5", ""), ("Without friction, the speed is 5 m/s.", "5", "m/s"),
    ("<answer>5 m</answer>", "5", "m"), ("Or 6?\n<answer>\\boxed{5} m</answer>\n", "5", "m"),
]  # fmt: skip
"""What is said, the key that it equals within 1 %, and the key's unit."""
WRONG_NUMBERS = [
    ("451 m", "450", "K"), ("430 K", "450", "K"), ("450 °C", "450", "K"), ("450 J", "450", "K"),
    ("-450 K", "450", "K"), ("450 furlongs", "450", "K"), ("450 mK", "450", "K"),
    ("450 or 460 K", "450", "K"), ("450 to 460 K", "450", "K"), ("450-460 K", "450", "K"),
    ("448 to 452 K", "450", "K"), ("[448, 452] K", "450", "K"), ("between 448 and 452 K", "450", "K"),
    ("448 K-452 K", "450", "K"), ("≥ 450 K", "450", "K"), ("at least 450 K", "450", "K"),
    (r"> 450\ \text{K}", "450", "K"), ("not 450 K", "450", "K"), ("450, 460", "450", "K"),
    ("T = 460 K, T = 450 K", "450", "K"), ("450 K (200 °C)", "450", "K"),
    (r"\boxed{460 K} or \boxed{450 K}", "450", "K"), ("450 460", "450", "K"), ("± 450 K", "450", "K"),
    (r"\pm 450", "450", ""), ("", "450", "K"), ("K", "450", "K"), ("four hundred", "450", "K"),
    ("T_450", "450", "K"), ("x^{450}", "450", "K"), ("45 0", "450", "K"), ("4 5 0", "450", "K"),
    ("0450 K", "450", "K"), ("4.5 × 10^3", "450", "K"), ("4.5·10⁻²", "450", "K"), ("5", "-5", ""),
    ("- 5", "5", ""), ("10^5", "1e-5", ""), ("10^{-6}", "1e-5", ""), (r"\frac43", "0.75", ""),
    ("34", "0.75", ""), (r"\frac{3}{4}", "34", ""), ("2 1/4", "0.5", ""), ("2 5/4", "3.25", ""),
    (r"\sqrt{4}", "4", ""), ("2π", "2", ""), (r"\boxed{1,5}", "15", ""), (r"\boxed{1,5}", "1", ""),
    (r"\boxed{1,5}", "5", ""), (r"\boxed{0,125}", "125", ""), ("0,125", "125", ""), ("1,234", "1.234", ""),
    ("5x", "5", ""), ("5 x", "5", ""), (r"5\alpha", "5", ""), ("5t", "5", ""), ("5 dozen", "5", ""),
    ("5 million", "5", ""), ("5(3)", "5", ""), ("50 %", "50", ""), ("0.5", "50", "%"), ("5 ppm", "5", ""),
    ("5 m", "5", ""), ("5 K", "5", ""), ("25 K", "25", "°C"), ("25 °F", "25", "°C"), ("25 °C", "25", "K"),
    ("0 °C", "0", "°F"), ("30 rad", "30", "°"), ("30′", "30", "°"), ("5 Hz", "5", "rad/s"),
    ("5 rad/s", "5", "Hz"), ("3", "5", "dB"), ("3 dB", "3", ""), ("5 min", "5", "h"),
    ("5 months", "5", "min"), ("5 m", "5", "mi"), ("5 in", "5", "m"), ("5 in long", "5", "m"),
    ("5 s", "5", "m"), ("5 Ns", "5", "N"), ("5 Nm", "5", "nm"), ("5 Nm", "5", "m"), ("5 Js", "5", "J"),
    ("5 mM", "5", "mm"), ("5 Mg", "5", "mg"), ("5 V/m", "5", "V"), ("5 J/widget", "5", "J"),
    ("5 m per furlong", "5", "m"), ("5 m * 3", "5", "m"), ("5 A", "5", "mA"), ("5 kJ", "5", "kJ/mol"),
    ("5 J mol", "5", "J/mol"), ("5 J K", "5", "J/K"), ("5 m^2", "5", "m"), ("5 m^-1", "5", "m"),
    ("5 m/s", "5", "m s"), ("5 m·s", "5", "m/s"), ("5 g", "5", "kg"), ("5 lm", "5", "cd"),
    ("1 h 90 min", "2.5", "h"), ("5 m 6 m", "5", "m"), ("5 apples", "5", "m"), ("1 in 5", "5", ""),
    ("5|6", "5", ""), ("the 5th", "5", ""), ("5!", "120", ""), ("1 2 3 4 5", "5", ""), ("5 ≠ 6", "6", ""),
    ("9.81 or 10", "9.81", ""),
    ("ln 2", "2", ""), (r"\ln 2", "2", ""), ("log 2", "2", ""), ("log_10 2", "2", ""), ("sin 30°", "30", "°"),
    ("exp(2)", "2", ""), ("x*5", "5", ""), ("x/5", "5", ""), ("x + 5", "5", ""), ("x+5", "5", ""),
    ("5 + x", "5", ""), ("5+x", "5", ""), ("5-x", "5", ""), ("5 - x", "5", ""), ("5 m + x", "5", "m"),
    ("5 m - x", "5", "m"), ("5!", "5", ""), ("5'", "5", "m"), ('5"', "5", "m"), ("5 €", "5", "m"),
    ("5_2", "5", ""), ("101_2", "101", ""), ("5i", "5", ""), ("5 + 2i", "5", ""), ("5 - 2i", "5", ""),
    ("5-2i", "5", ""), ("minus 5", "5", ""), ("negative 5 °C", "5", "°C"), ("twice 5", "5", ""),
    ("the square root of 5", "5", ""), ("half of 5 m", "5", "m"), ("5 out of 10", "5", ""), ("3:1", "3", ""),
    ("2^{1/2}", "2", ""), ("e^{2}", "2", ""), ("5 (furlongs)", "5", "m"), ("5 (s)", "5", "m"),
    ("5 y", "5", "d"), ("10ms^{-1}", "10", "m/s"), ("5 h 30", "5", "h"), ("5 ft-lb", "5", "ft"),
    ("5 m by 6 m", "5", "m"), ("450 K at 2 K/s", "450", "K"), ("5 J per mole", "5", "J"),
    ("5 J/particle", "5", "J"), ("10^x", "10", ""), ("10^{x}", "10", ""), ("2x", "2", ""), ("x2", "2", ""),
    ("5 sin x", "5", ""), ("2.5.1", "2.5", ""), ("1,23,456", "1", ""), ("5 ≤ x", "5", ""), ("5 → 6", "5", ""),
    ("5; 6", "6", ""),
    (r"\arctan(0.5)", "0.5", ""), ("450 K (200 degrees Celsius)", "450", "K"), (r"\lambda 5", "5", ""),
    ("450 K (3 light years)", "450", "K"), (r"5 \to 6", "5", ""), ("arccos 0.5", "0.5", ""),
    (r"\boxed{100} J", "100", "N"), (r"\boxed{100} furlongs", "100", "m"),
    (r"\boxed{100}\text{ km}", "100", "m"), (r"\boxed{5 m} per furlong", "5", "m"),
    (r"\boxed{5} million", "5", ""), (r"\boxed{5} \times 10^3", "5", ""), (r"\boxed{5}^2", "5", ""),
    (r"\boxed{5}x", "5", ""), (r"\boxed{5}\%", "5", ""), (r"\boxed{5\text{ m}} / s", "5", "m"),
    ("6 m = 5 m", "5", "m"), ("6 = 5", "5", ""), ("4 ≈ 5", "5", ""), ("6 cm = 5 m", "5", "m"),
    ("5 ± 300 m", "5", "m"), ("(5 ± 300) m", "5", "m"), ("5 m ± 3 km", "5", "m"), ("5 m ± 200%", "5", "m"),
    ("力的大小不是100 N。", "100", "N"), ("至少为100 N", "100", "N"), (r"x = -\boxed{5}", "5", ""),
    (r"\pm\boxed{5}", "5", ""), (r"10^{\boxed{5}}", "5", ""), (r"x \ge \boxed{5}", "5", ""),
    (r"not \boxed{5}", "5", ""), (r"2\boxed{5}", "5", ""), ("5 m? No.", "5", "m"), ("x=6,y=5", "5", ""),
    (r"\boxed{5} or 6", "5", ""), (r"\boxed{5}\text{ m} or maybe 6 m", "5", "m"), ("5 and a half", "5", ""),
    ("5 and a half hours", "5", "h"), ("one hundred and 5", "5", ""), ("101 binary", "101", ""),
    ("ten to the power 5", "5", ""), ("one over 5", "5", ""), ("5 squared", "5", ""),
    ("5 factorial", "5", ""), ("5 halves", "5", ""),
    ("5 millions", "5", ""), ("5 lakh", "5", ""), ("5 tenths", "5", ""), ("5 °C below zero", "5", "°C"),
    ("anything but 5 m", "5", "m"), ("a multiple of 5 m", "5", "m"), ("a third of 5 m", "5", "m"),
    ("root 5", "5", ""), ("without 5 m", "5", "m"), ("It is no longer 5 m", "5", "m"),
    ("5 m is incorrect", "5", "m"), ("5 negative", "5", ""), ("exceeding 5 m", "5", "m"),
    ("<answer>6 m</answer><answer>5 m</answer>", "5", "m"), ("5 m <answer>6 m</answer>", "5", "m"),
]  # fmt: skip
"""What is said, a key that it does not equal or does not state as its only value, and the key's unit."""


@pytest.mark.parametrize(("said", "key", "name"), RIGHT_NUMBERS)
async def test_right_numbers(said: str, key: str, name: str) -> None:
    assert await score(said, answer=key, numeric={"unit": name}) == 1.0


@pytest.mark.parametrize(("said", "key", "name"), WRONG_NUMBERS)
async def test_wrong_numbers(said: str, key: str, name: str) -> None:
    assert await score(said, answer=key, numeric={"unit": name}) == 0.0


@pytest.mark.parametrize(
    ("said", "key", "rule", "reward"),
    [
        ("0.05", "0", {"relative": 0.0, "absolute": 0.1}, 1), ("0.05", "0", {"relative": 1.0}, 0),
        ("100.0", "100", {"relative": 0.0}, 1), ("0.1 km", "100", {"relative": 0.0, "unit": "m"}, 1),
        ("298.15 K", "25", {"relative": 0.0, "unit": "°C"}, 1), ("101", "100", {"relative": 0.01}, 1),
        ("101.1", "100", {"relative": 0.01}, 0), ("102", "100", {"relative": 0.01, "absolute": 2.0}, 1),
        # The permitted distance is a share of the number in the task's unit, here 0.25 °C.
        ("298.6 K", "25", {"relative": 0.01, "unit": "°C"}, 0),
    ],
)  # fmt: skip
async def test_tolerances(said: str, key: str, rule: dict[str, Any], reward: float) -> None:
    assert await score(said, answer=key, numeric=rule) == reward


@pytest.mark.parametrize(
    ("said", "key", "reward"),
    [
        ("The answer is  Rayleigh  Scattering.", "Rayleigh scattering", 1), ("**Mitosis**", "mitosis", 1),
        (r"\boxed{\text{mitosis}}", "mitosis", 1), ("“mitosis”", "mitosis", 1), ("Mitosis;", "mitosis.", 1),
        ("H₂O", "H2O", 1), (r"\mathrm{H_2O}", "H2O", 1), (r"\ce{H2O}", "H₂O", 1), ("Fe³⁺", "Fe^{3+}", 1),
        ("ﬁssion", "fission", 1), ("α−decay", "α-decay", 1), ("a , b", "a,b", 1), ("x - 1", "x-1", 1),
        (r"\boxed{H_2O}, so \boxed{H2O}", "H2O", 1), ("Answer: scattering", "Rayleigh scattering", 0),
        ("x^2", "x2", 0), ("10^5", "105", 0), ("1 2", "12", 0), (".5", "5", 0), ("(0,1)", "[0,1]", 0),
        ("<answer>Mitosis</answer>", "mitosis", 1),
        ("<answer>meiosis</answer><answer>mitosis</answer>", "mitosis", 0),
        ("5'", "5", 0), ("'5'", "5", 1), ("y'", "y", 0), ("x^-1", "x-1", 0), ("Na^+", "Na+", 1),
        ("Fe3+", "Fe^{3+}", 1), ("Fe2+", "Fe3+", 0), ("5m", "5 m", 1), ("Co", "CO", 0), ("Na", "Na+", 0),
        ("AA", "Aa", 0), ("aaBb", "AaBb", 0), ("dna", "DNA", 1), ("no", "No", 1), ("An atom", "an atom", 1),
        ("5!", "5", 0), ("mitosis or meiosis", "mitosis", 0), ("", "mitosis", 0), (".", "mitosis", 0),
        (r"\boxed{meiosis} or \boxed{mitosis}", "mitosis", 0),
    ],
)  # fmt: skip
async def test_exact_answers(said: str, key: str, reward: float) -> None:
    assert await score(said, answer=key) == reward


@pytest.mark.parametrize(
    ("said", "task", "shown"),
    [
        ("Answer: A", {"answer": "B", "choices": CHOICES}, "read: A"),
        ("", {"answer": "B", "choices": CHOICES}, "read: no single letter"),
        ("T = 4.5·10² K", {"answer": "450", "numeric": {"unit": "K"}}, "read: 450 K\nright: 450 ± 4.5 K"),
        ("5 m", {"answer": "5", "numeric": {"unit": "s"}},
         "read: 5 m (not in the unit of the answer)\nright: 5 ± 0.05 s"),
        ("5 or 6", {"answer": "5", "numeric": {}}, "read: 5, 6\nright: 5 ± 0.05"),
        ("5 to 6", {"answer": "5", "numeric": {}}, "read: no value, or several\nright: 5 ± 0.05"),
        (r"\boxed{\text{Gold}}", {"answer": "gold"}, "read: gold"),
    ],
)  # fmt: skip
async def test_people_are_shown_what_was_read(said: str, task: dict[str, Any], shown: str) -> None:
    given = context(said, **task)
    await StemHandler().eval(given)
    assert given.shown == f"compared answer: {said or 'none'}\nexpected: {task['answer']}\n{shown}"


@pytest.mark.parametrize(
    ("said", "task", "reward"),
    [
        ("Answer: B", {"choices": CHOICES, "answers": ["A", "B"]}, 1.0),
        ("Answer: C", {"choices": CHOICES, "answers": ["A", "B"]}, 0.0),
        ("600 cm", {"numeric": {"unit": "m"}, "answers": ["5", "6"]}, 1.0),
        ("7 m", {"numeric": {"unit": "m"}, "answers": ["5", "6"]}, 0.0),
        ("**Tin**", {"answers": ["gold", "tin"]}, 1.0), ("iron", {"answers": ["gold", "tin"]}, 0.0),
    ],
)  # fmt: skip
async def test_any_accepted_answer_is_right(said: str, task: dict[str, Any], reward: float) -> None:
    given = context(said, **task)
    assert (await StemHandler().eval(given)).reward == reward
    assert all(f"expected: {answer}" in (given.shown or "") for answer in task["answers"])


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ({}, "answer: required"), ({"answer": "E", "choices": CHOICES}, "answer: must be one of .* A to D"),
        ({"answer": "x", "numeric": {}}, "answer: must be one number"),
        ({"answer": "5 to 6", "numeric": {}}, "answer: must be one number"),
        ({"answer": "5 s", "numeric": {"unit": "m"}}, "answer: must be one number"),
        ({"answer": r"\frac{", "numeric": {}}, "answer: must be one number"),
        ({"answer": "1", "numeric": {"unit": "parsnip"}}, "numeric.unit: is not known"),
        ({"answer": "1", "numeric": {"unit": "kPA"}}, "numeric.unit: is not known"),
        ({"answer": "1", "numeric": {"unit": "m^(1/0)"}}, "numeric.unit: is not known"),
        ({"answer": "1", "numeric": {"unit": "m^99"}}, "numeric.unit: is not known"),
        ({"answer": "A", "choices": CHOICES, "numeric": {}}, "numeric: cannot be given"),
        ({"answer": "**"}, "answer: must be more than"),
        ({"answers": ["A", "E"], "choices": CHOICES}, r"answers\[1\]: must be one of .* A to D"),
        ({"answers": ["x", "5"], "numeric": {}}, r"answers\[0\]: must be one number"),
        ({"answers": ["5", "**"]}, r"answers\[1\]: must be more than"),
    ],
)  # fmt: skip
async def test_tasks_that_cannot_be_scored(task: dict[str, Any], problem: str) -> None:
    with pytest.raises(TaskInvalid, match=problem):
        await score("1", **task)


@pytest.mark.parametrize(
    ("name", "size", "base"),
    [
        # NIST's Special Publication 811, appendix B, and CODATA 2022.
        ("acre", 4046.856, "m^2"), ("Btu", 1055.056, "J"), ("gal", 3.785412e-3, "m^3"), ("hp", 745.6999, "W"),
        ("lbf", 4.448222, "N"), ("psi", 6894.757, "Pa"), ("oz", 0.02834952, "kg"), ("nmi", 1852, "m"),
        ("slug", 14.59390, "kg"), ("mmHg", 133.3224, "Pa"), ("torr", 133.3224, "Pa"), ("Ci", 3.7e10, "Bq"),
        ("Oe", 79.57747, "A/m"), ("P", 0.1, "Pa s"), ("rem", 0.01, "Sv"), ("kn", 0.5144444, "m/s"),
        ("pc", 3.085678e16, "m"), ("ly", 9.460730e15, "m"), ("E_h", 4.359745e-18, "J"),
        ("Ry", 2.179872e-18, "J"), ("a_0", 5.291772e-11, "m"), ("u", 1.660539e-27, "kg"),
        ("D", 3.335641e-30, "C m"),
        ("Jy", 1e-26, "W s/m^2"),
    ],
)  # fmt: skip
def test_published_sizes_of_units(name: str, size: float, base: str) -> None:
    given, wanted = unit(name), unit(base)
    assert given.convert(1.0, wanted) == pytest.approx(size, rel=1e-6)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("So.\n\nAnswer: 34", "34"), ("**Answer:** $34$", "34"),
        (r"Answer: \( \frac{1}{2} \)", r"\frac{1}{2}"),
        (r"Answer: \boxed{34}", "34"),
        (r"Final Answer: The final answer is $34$. I hope it is correct.", "34"),
        ("Answer: 1,234", "1234"), ("Answer: 1\nAnswer: 2", "2"), (r"Answer: $\$5$", "5"),
        (r"\[ 7 \]", "7"), ("#### 72", "72"),
    ],
)  # fmt: skip
def test_the_answer_forms_of_verl_and_dapo(said: str, answer: str) -> None:
    assert final_answer(said) == answer


UNITS = [
    # The units of a line are of one kind. Each has its size, and the ways in which it is written.
    [(1.0, "m", r"\text{ m}", "meters"), (0.01, "cm", r"\,\mathrm{cm}", "centimetres"),
    (0.3048, "ft", "feet")],
    [(1.0, "s", r"\ \text{s}", "seconds"), (60.0, "min", "minutes"), (3600.0, "h", r"~\mathrm{h}", "hours")],
    [(1.0, "J", "N m", "joules"), (4184.0, "kcal"), (3.6e6, "kWh", "kW·h"), (1.602176634e-19, "eV")],
    [(1.0, "m/s^2", r"\ \mathrm{m\,s^{-2}}", "m·s⁻²", "m/s/s", "meters per second squared"), (0.01, "cm/s²")],
    [(1.0, "J/(mol K)", r"\text{ J mol}^{-1}\text{ K}^{-1}", "J/mol/K"), (1e3, "kJ·mol⁻¹·K⁻¹")],
    [(1.0, "mol/L", "M", "mol dm^{-3}", "molar"), (1e-3, "mM", "mmol/L"), (1e3, "mol/mL")],
    [(1.0, "Pa", "N/m²", "pascals"), (101325.0, "atm"), (1e5, "bar"), (6894.757293168, "psi")],
    [(1.0, "")],
]  # fmt: skip
SENTENCES = (
    "{}", "The answer is {}.", "**{}**", r"\boxed{{{}}}", "$x_1 = {}$", r"\(\approx {}\)", "It is about {}.",
)  # fmt: skip


def spelled(value: float, chance: random.Random) -> str:
    """Return a number with 6 digits, in one of the ways in which people write it."""
    digits, _, exponent = f"{value:.5e}".partition("e")
    power = int(exponent)
    raised = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    forms = [
        f"{value:.6g}", f"{value:.5e}", f"{value:.6g}".replace("-", "−"), f"{digits} × 10{raised}",
        rf"{digits} \times 10^{{{power}}}", rf"{digits} \cdot 10^{{{power}}}", f"{digits}·10{raised}",
        f"{digits}*10^{power}", f"{digits} x 10^({power})",
    ]  # fmt: skip
    if 0.1 < abs(value) < 1e5:
        forms.append(rf"\frac{{{value * 2:.6g}}}{{2}}")
    if 1e3 <= abs(value) < 1e9:
        forms += [f"{value:,.3f}", f"{value:,.3f}".replace(",", " "), f"{value:,.3f}".replace(",", "{,}")]
    return chance.choice(forms)


@pytest.mark.parametrize("pairs", [500, pytest.param(10_000, marks=pytest.mark.nightly)])
async def test_equal_numbers_are_right_and_changed_ones_are_wrong(pairs: int) -> None:
    chance = random.Random(pairs)
    refused = []
    for _ in range(pairs):
        kind = chance.choice(UNITS)
        (size, *names), (other, *others) = chance.choice(kind), chance.choice(kind)
        value = chance.choice((-1, 1)) * 10 ** chance.uniform(-6, 6)
        task = {"answer": f"{value:.8g}", "numeric": {"unit": names[0], "relative": 0.01}}
        sentence, name = chance.choice(SENTENCES), chance.choice(others)
        name = name if name.startswith(("\\", "~")) else f" {name}"
        said = sentence.format(spelled(value * size / other, chance) + name)
        if await score(said, **task) != 1.0:
            refused.append((said, task))
        # The permitted distance is one part in a hundred, and each change is at least of two.
        changed = value * chance.choice(
            (chance.uniform(1.0201, 3), chance.uniform(0.1, 0.9799), -1, 10, 0.001, 60)
        )
        said = sentence.format(spelled(changed * size / other, chance) + name)
        assert await score(said, **task) == 0.0, (said, task)
    assert len(refused) <= pairs * 0.005, refused[:5]
