"""Guessed encodings of texts that are not UTF-8."""

import pytest

from recmill.datasets.inputs.encodings import likely_encoding

CHINESE = "店铺,标题\n1,我们在北京买了新的手机和电脑\n2,上海的天气今天很好\n3,随机推荐系统需要许多数据\n"
TRADITIONAL = "商店,標題\n1,我們在台北買了新的手機和電腦\n2,今天的天氣很好\n3,推薦系統需要許多資料\n"
JAPANESE = "店,題名\n1,東京で新しい電話を買いました\n2,今日はとてもいい天気です\n"
KANJI = "店,地名\n1,東京都\n2,大阪府\n3,京都府\n4,北海道\n"
KOREAN = "가게,제목\n1,서울에서 새 전화기를 샀습니다\n2,오늘은 날씨가 매우 좋습니다\n"
RUSSIAN = "магазин,название\n1,Мы купили новый телефон в Москве\n2,Сегодня хорошая погода\n"
FRENCH = "boutique,titre\n1,Le café était fermé à cause de la grève\n2,Où est l'hôtel ?\n"
GREEK = "\n".join(chr(first) + chr(first + 3) + chr(first + 9) for first in range(0x3B1, 0x3B9)) + "\n"
GERMAN = "Laden,Titel\n1,Die größte Straße führt über die Brücke nach Köln\n"


@pytest.mark.parametrize(
    ("text", "codec", "expected"),
    [
        (CHINESE, "gbk", "gb18030"),
        (CHINESE, "gb18030", "gb18030"),
        (TRADITIONAL, "big5", "big5"),
        (JAPANESE, "shift_jis", "cp932"),
        (KANJI, "cp932", "cp932"),
        (JAPANESE, "euc_jp", "euc_jp"),
        (KOREAN, "cp949", "cp949"),
        (RUSSIAN, "cp1251", "cp1251"),
        (FRENCH, "latin-1", "latin-1"),
        (FRENCH.replace("'", "\u2019"), "cp1252", "cp1252"),
        (GERMAN, "latin-1", "latin-1"),
        (CHINESE, "utf-8", "utf-8"),
        (CHINESE, "utf-16", "utf-16"),
    ],
)
def test_the_codec_is_recognized_by_characters_that_are_usual_in_its_language(
    text: str, codec: str, expected: str
) -> None:
    assert likely_encoding(text.encode(codec)) == expected


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        (RUSSIAN, "koi8_r"),
        ("name\n\u041c\u041e\u0421\u041a\u0412\u0410\n", "cp1251"),
        (GREEK, "cp1253"),
        ("ชื่อ\nวันนี้อากาศดีมาก\n", "cp874"),
        ("name\n한국\n", "cp949"),
    ],
)
def test_no_codec_is_named_where_several_fit_or_none_does(text: str, codec: str) -> None:
    assert likely_encoding(text.encode(codec)) == ""
