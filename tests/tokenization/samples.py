"""Texts that a vocabulary has to give back byte for byte."""

LANGUAGES = [
    "The quick brown fox jumps over the lazy dog; 3.14159, isn't it?",
    "Der schnelle braune Fuchs springt über den faulen Hund – größer als 10 €.",
    "Le cœur déçu mais l'âme plutôt naïve, Louÿs rêva de crapaüter.",
    "El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia. ¿Qué?",
    "Pchnąć w tę łódź jeża lub ośm skrzyń fig.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Pijamalı hasta yağız şoföre çabucak güvendi.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Чуєш їх, доцю, га? Кумедна ж ти, прощайся без ґольфів!",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "דג סקרן שט בים מאוכזב ולפתע מצא לו חברה.",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر.",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण।",
    "আমি বাংলায় গান গাই, আমি বাংলার গান গাই।",
    "யாமறிந்த மொழிகளிலே தமிழ்மொழி போல் இனிதாவது எங்கும் காணோம்.",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน",
    "天地玄黃,宇宙洪荒。日月盈昃,辰宿列張。",
    "いろはにほへと ちりぬるを カタカナ、漢字も。",
    "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다.",
    "Con sói nâu nhảy qua con chó lười, đường phố Hà Nội.",
    "ქართული ენა ძალიან ლამაზია.",
    "Բարեւ աշխարհ, ինչպես եք։",
]

ODD = [
    "😀👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 ﷽ \u202eright to left\u202c",
    "tab\there\nnewline\r\nreturn\x00nul\x1b[31mescape\x7f",
    "    four spaces,\n\n\nthree lines  two",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": x ** 2}  # ünïcode",
    "\ufffd\ufeff\u00a0\u2003",
    "ĠĊĉ ▁▁ <0x41> ## </w> @@",
    "".join(map(chr, range(32, 256))),
]
